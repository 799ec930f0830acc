"""Last-level misses on a CPU: valgrind's file read, a valgrind that is played around the real child, and bad input."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tilestream.bench import valgrind
from tilestream.bench.cases import Case
from tilestream.bench.report import read_lines
from tilestream.bench.valgrind import events_of, find_valgrind, measure_misses, simulated_bytes
from tilestream.cli import main
from tilestream.errors import ArgumentError
from tilestream.io.model import compulsory_bytes

CASE = Case("c", seqlen_q=24, seqlen_k=24, num_heads_q=2, num_heads_kv=2, head_dim=8, head_dim_v=8, causal=True)
DUMP = """version: 1
desc: Trigger: callgrind_control
events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw ILdmr DLdmr DLdmw
fn=(1) attention
12 100 50
totals: 900 400 200 9 8 7 6 500 300 1 20
"""
# Does what the real one does for the child: start it, and write the file when it is told to.
PLAYED = """
import os, subprocess, sys
[out] = [word.partition("=")[2] for word in sys.argv if word.startswith("--callgrind-out-file=")]
start = next(place for place, word in enumerate(sys.argv) if word.split("/")[-1].startswith("python"))
open({record!r}, "w").write("\\n".join([*sys.argv[1:start], os.environ.get("TILESTREAM_NATIVE_ISA", "none given")]))
sys.exit(subprocess.run(sys.argv[start:], env={{**os.environ, "PLAYED_OUT": out, "PYTHONPATH": {path!r}}}).returncode)
"""
CONTROL = """
import os, sys
if sys.argv[1].startswith("--dump"):
    open(os.environ["PLAYED_OUT"] + ".1", "w").write({dump!r})
print("OK." if {works} else "Error: no callgrind runs there")
"""


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Put a valgrind and a callgrind_control on the search path; returns where the first notes how it was called."""

    def program(name: str, body: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\n{body}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def play(valgrind: str = PLAYED, dump: str = DUMP, works: bool = True) -> Path:
        record = tmp_path / "record"
        root = str(Path(__file__).parent.parent)
        program("valgrind", valgrind.format(record=str(record), path=root))
        program("callgrind_control", CONTROL.format(dump=dump, works=works))
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("TILESTREAM_NATIVE_ISA", raising=False)
        return record

    return play


def test_valgrinds_file_is_read() -> None:
    events = events_of(DUMP)
    assert events["DLmr"] == 500
    assert (events["ILdmr"], events["DLdmr"], events["DLdmw"]) == (1, 20, 0)
    for text in ("", DUMP.replace("totals", "sums"), DUMP.replace("events", "names")):
        with pytest.raises(ValueError, match="no totals"):
            events_of(text)


def test_the_simulated_cache_is_a_power_of_two() -> None:
    assert [simulated_bytes(size) for size in (1024, 1025, 2 << 20, 300 << 20)] == [1024, 1024, 2 << 20, 256 << 20]
    with pytest.raises(ArgumentError, match="a cache of 1000 bytes cannot be simulated; the smallest has 1024"):
        simulated_bytes(1000)


@pytest.mark.no_poison
def test_misses_of_one_call_are_bytes(play: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    record = play()
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (line,) = measure_misses(CASE, "both", ["tilestream/cpu"], 3 << 20)
    assert (line["reason"], line["is_wrong"], line["suite"], line["num_threads"]) == (None, False, "misses", 1)
    problem = CASE.problem("cpu")
    least = compulsory_bytes(problem) + compulsory_bytes(problem, backward=True)
    assert (line["read_bytes"], line["written_bytes"]) == (64 * 500, 64 * 21)
    # What lies in the cache still must be written too.
    assert line["moved_bytes"] == 64 * 500 + max(64 * 21, least.written_bytes)
    assert line["over_least"] == pytest.approx(line["moved_bytes"] / least.total_bytes)
    assert line["bytes_model"] >= line["bytes_cached_model"] >= line["bytes_least"] == least.total_bytes
    assert line["cache_bytes"] == 2 << 20
    asked = record.read_text().splitlines()
    assert {"--tool=callgrind", "--instr-atstart=no", "--cache-sim=yes", f"--LL={2 << 20},16,64"} <= set(asked)
    # Valgrind runs neither AMX nor AVX-512.
    assert asked[-1] == "x86-64-v3"
    json.dumps(line)


@pytest.mark.no_poison
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"works": False}, "the measured process failed: code 1, callgrind_control --instr=on: ['Error: no callgrind"),
        ({"dump": "nothing"}, "valgrind's file is not understood: no totals"),
        ({"valgrind": "print('wrong result: out is off'); import sys; sys.exit(1)"}, "wrong result: out is off"),
        ({"valgrind": "import sys; sys.exit('no memory')"}, "the measured process failed: code 1, no memory"),
    ],
)
def test_what_cannot_be_counted_has_a_reason(
    arguments: dict[str, object], reason: str, play: Callable[..., Path]
) -> None:
    play(**arguments)
    (line,) = measure_misses(CASE, "forward", ["tilestream/cpu"], 2 << 20)
    assert str(line["reason"]).startswith(reason)
    assert (line["read_bytes"], line["moved_bytes"], line["over_least"]) == (None, None, None)
    assert line["is_wrong"] == (not reason.startswith("valgrind"))


def test_what_is_refused_or_missing(play: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    play()
    (line,) = measure_misses(CASE, "forward", ["sdpa/flash"], 2 << 20)
    assert (line["reason"], line["is_wrong"]) == ("runs on CUDA, not on cpu", False)
    large = Case("large", seqlen_q=8192, seqlen_k=8192)
    with pytest.raises(ArgumentError, match="too large to be measured under valgrind"):
        next(measure_misses(large, "forward", ["sdpa"], 2 << 20))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ArgumentError, match="there is no valgrind on the search path"):
        find_valgrind()


SMALL = "traffic --seqlen 24 --heads 2 --head-dim 8 --causal --both"
BAD_INPUTS = {
    f"{SMALL} --output lines.jsonl": "--output is where --measure writes its lines; give both",
    f"{SMALL} --measure --varlen 3": "--measure measures dense calls, not --varlen",
    f"{SMALL} --measure --deterministic": "--measure does not know --deterministic",
    f"{SMALL} --measure --device mps": "--measure measures on cpu and cuda, not on mps",
    f"{SMALL} --measure --fast-memory 900 --head-dim 1": "a cache of 900 bytes cannot be simulated",
    f"{SMALL} --measure --seqlen 9000": "too large to be measured under valgrind",
}


@pytest.mark.parametrize("line", BAD_INPUTS)
def test_bad_input_is_one_line_and_code_2(
    line: str, play: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    play()
    arguments = line.split()
    if "--varlen" in arguments:
        arguments = [word for word in arguments if word not in ("--seqlen", "24")]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert BAD_INPUTS[line] in captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), "--measure", "--device", "cuda"]) == 2
    assert "--measure --device cuda needs a CUDA device" in capsys.readouterr().err


def test_the_command_shows_measured_beside_modelled(
    monkeypatch: pytest.MonkeyPatch, play: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play()
    counts = {"ILdmr": 0, "DLmr": 10**6, "DLdmr": 10**5, "DLdmw": 0}
    asked = []

    def run(program: str, size: int, request: dict[str, object]) -> tuple[dict[str, int] | None, str | None]:
        asked.append((request["provider"], request["mode"]))
        return (None, "it rained") if request["provider"] == "sdpa" else (counts, None)

    monkeypatch.setattr(valgrind, "_run", run)
    output = tmp_path / "lines.jsonl"
    call = f"{SMALL} --fast-memory 300000 --measure --output {output}".split()
    assert main(call) == 0
    captured = capsys.readouterr()
    assert asked == [("tilestream", "both"), ("eager", "both"), ("sdpa", "both")]
    assert "sdpa was not measured: it rained" in captured.err
    header = next(text for text in captured.out.splitlines() if "(measured" in text)
    assert "tilestream (model)" in header
    assert header.count("(measured, simulated cache of 262 KB)") == 2
    assert "64 MB" in captured.out
    lines = read_lines(output)
    assert [line["provider"] for line in lines] == ["tilestream", "eager", "sdpa"]
    # Shown again, without measuring.
    assert main([*SMALL.split(), "--measured", str(output), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["measured"]
    assert [(line["provider"], line["read_bytes"], line["cache_bytes"]) for line in again] == [
        ("tilestream", 64 * 10**6, 262144), ("eager", 64 * 10**6, 262144),
    ]  # fmt: skip
    monkeypatch.setattr(valgrind, "_run", lambda *given: (None, "wrong result: out is off"))
    assert main(call) == 2
    assert "could not be measured" in capsys.readouterr().err
