"""``tilestream traffic``: tables, the JSON object, replays, measurements of other days, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilestream.cli import main
from tilestream.io import counters, recount
from tilestream.io.memory import TwoLevelMemory

MEASURED = Path(__file__).parent.parent / "benchmarks" / "results" / "traffic-suite.jsonl"
H200 = "--fast-memory 232448"
SMALL = (
    "--batch 2 --seqlen-q 40 --seqlen-k 50 --heads 4 --kv-heads 2 --head-dim 16 --head-dim-v 8 --causal --window 20 3"
)

BAD_INPUTS = {
    "--fast-memory -5": "--fast-memory: must be at least 1, got -5",
    "--fast-memory 2K": "--fast-memory: must be a whole number, got '2K'",
    "--fast-memory 100": "fast memory of 100 bytes is smaller than a row: tiles of 1 x 1 (queries x keys) need 1036",
    "--fast-memory 3000 --block-m 64": "fast memory of 3000 bytes is too small: tiles of 64 x 1",
    "--fast-memory 3000 --dtype float64 --head-dim 512": "is smaller than a row",
    "--seqlen -1": "--seqlen-q/--seqlen: must be at least 0, got -1",
    "--block-m 0": "--block-m: must be at least 1, got 0",
    "--block-n -3": "--block-n: must be at least 1, got -3",
    "--heads 6 --kv-heads 4": "--heads 6 must be a multiple of --kv-heads 4",
    "--preset gpt5": "invalid choice: 'gpt5'",
    "--forward --both": "not allowed with argument",
    "--varlen 3 4 --seqlen-k 7": "--seqlen-k and --varlen exclude each other",
    "--count --seqlen 8192": "the call is too large to be counted",
    "--count --softcap 3 --seqlen 8": "traffic of softcap is not counted",
    "--blocks {file}/missing": "cannot read --blocks",
    "--blocks {file}": "is not a JSON matrix of 0 and 1",
    "--blocks {matrix}": "give block_m and block_n",
    "--blocks {matrix} --block-m 64 --block-n 64 --seqlen 100": "blocks must be 2 x 2, the tiles",
    "--blocks {matrix} --block-m 4 --block-n 4 --varlen 3 4": "not of packed sequences",
    "--measured {file}/missing": "cannot read --measured",
    "--measured {matrix}": "is not a file of lines",
    "--measured {file}": "is not a file of lines",
    "--measured {lines} --seqlen 7": "has no bytes of this call, forward: batch 1, 7 queries",
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str, str]]:
    """Exit code, standard output and standard error of one command line."""

    def run(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["traffic", *line.split()])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


Run = Callable[[str], tuple[int, str, str]]


@pytest.mark.parametrize("line", BAD_INPUTS)
def test_bad_input_is_one_line_and_code_2(line: str, run: Run, tmp_path: Path) -> None:
    file, matrix, lines = tmp_path / "file", tmp_path / "matrix.json", tmp_path / "lines.jsonl"
    file.write_text("hello")
    matrix.write_text("[[1, 0]]")
    lines.write_text('{"suite": "traffic", "mode": "backward"}\n')
    code, out, err = run(line.format(file=file, matrix=matrix, lines=lines))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("tilestream")
    assert BAD_INPUTS[line] in err


def described(run: Run, line: str) -> dict[str, Any]:
    code, out, _ = run(f"{line} --json")
    assert code == 0
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_setting_of_the_paper(run: Run) -> None:
    code, out, err = run(f"--preset gpt2-medium {H200}")
    assert (code, err) == (0, "")
    for text in (
        "float16 on cpu; causal, dropout; forward and backward",
        "Fast memory M: 232 KB (given).",
        "standard (model)",
        "40.3 GB",
        "1.62 GB",
        "24.9x",
        "p_dropped 2.15 GB, keep_mask 1.07 GB",
        "M of 232 KB lies above 8.19 KB to 131 KB",
    ):
        assert text in out
    assert "(counted)" not in out
    assert "(measured)" not in out


def test_options_after_a_preset_change_it(run: Run) -> None:
    assert described(run, "--preset gpt2-medium --batch 1 --forward")["call"].startswith("batch 1, 1024 queries")
    assert described(run, "--preset gpt2-medium --forward")["direction"] == "forward"


@pytest.mark.parametrize("direction", ["--forward", "--backward", "--both"])
@pytest.mark.parametrize("call", [SMALL, f"{SMALL} --dropout 0.2 --dtype bfloat16", "--varlen 3 0 20 --heads 2"])
def test_counted_is_what_is_modelled(run: Run, call: str, direction: str) -> None:
    found = described(run, f"{call} {direction} --count --fast-memory 60000 ")
    by_source: dict[str, dict[str, Any]] = {"model": {}, "counted": {}}
    for entry in found["algorithms"]:
        by_source[entry["source"]][entry["algorithm"]] = entry
    assert set(by_source["counted"]) == {"standard", "FlashAttention", "tilestream"}
    for name, counted in by_source["counted"].items():
        modelled = by_source["model"][name]
        assert counted["fast_memory_bytes"] <= modelled["fast_memory_bytes"]
        for one in (counted, modelled):
            del one["source"], one["fast_memory_bytes"]
        assert counted == modelled


def test_kept_blocks_are_an_algorithm_of_their_own(run: Run, tmp_path: Path) -> None:
    matrix = tmp_path / "blocks.json"
    matrix.write_text("[[1, 0], [0, 1]]")
    line = f"--seqlen 32 --block-m 16 --block-n 16 --both --count --blocks {matrix}"
    code, out, _ = run(line)
    assert code == 0
    assert "tilestream, block-sparse (counted)" in out
    entries = {(e["algorithm"], e["source"]): e for e in described(run, line)["algorithms"]}
    dense, sparse = (entries[name, "counted"]["tensors"] for name in ("tilestream", "tilestream, block-sparse"))
    # q and k are read as they are streamed in one pass and once in another.
    assert sparse["v"]["read_bytes"] < dense["v"]["read_bytes"]
    assert entries["tilestream, block-sparse", "model"]["flops"] * 2 == entries["tilestream", "model"]["flops"]


def test_a_table_says_counted(run: Run) -> None:
    code, out, _ = run(f"{SMALL} --count")
    assert code == 0
    header = next(line for line in out.splitlines() if "(counted)" in line)
    assert header.split("  ")[0] == ""
    assert "tilestream (model)" in header
    assert "tilestream (counted)" in header


def test_measurements_come_from_a_file_alone(run: Run) -> None:
    call = f"--batch 64 --heads 16 --dtype float16 --measured {MEASURED} {H200}"
    code, out, _ = run(call)
    assert code == 0
    assert "tilestream/hopper (measured)" in out
    [line] = described(run, call)["measured"]
    assert line["source"] == "measured"
    assert line["moved_bytes"] >= line["read_bytes"]
    assert "H200" in line["device"]
    code, _, err = run(f"{call} --backward")
    assert code == 2
    assert "has no bytes of this call, backward" in err


def test_a_wrong_replay_is_never_printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TwoLevelMemory.store

    def half(self: TwoLevelMemory, name: str, index: Any, tile: Any) -> None:
        tile.set(tile.data * 0.5)
        store(self, name, index, tile)

    monkeypatch.setattr(counters.TwoLevelMemory, "store", half)
    with pytest.raises(AssertionError, match="wrong result"):
        run(f"{SMALL} --count")
    assert recount.recount.__doc__


def test_odd_calls(run: Run) -> None:
    code, out, err = run("--seqlen 0")
    assert (code, err) == (0, "")
    assert "does not fit" not in out
    code, out, err = run("--softcap 3 --alibi --seqlen 100000")
    assert code == 0
    assert err == "Not in these numbers: the traffic of softcap, alibi.\n"
    # Too long for the table over sizes of fast memory.
    assert "fast memory  " not in out.partition("Size of fast memory")[2]
    assert run("--seqlen-q 5 --seqlen-k 0")[0] == 0
    assert run("--batch 0")[0] == 0
