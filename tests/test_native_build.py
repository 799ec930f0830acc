"""The native kernels' way to the user: compiled where a compiler is found, loaded where a processor can run them.

Nothing here looks at what the kernels compute: the libraries are a stub of seven functions.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tilestream.backends.cpu.native.isa import (
    COMPILERS,
    ISAS,
    RECORD,
    cpu_features,
    isas_for,
    library_name,
    machine_name,
)
from tilestream.backends.cpu.native.library import VARIABLE, Library, Loader
from tilestream.errors import ArgumentError

ROOT = Path(__file__).parent.parent
ABI = 8
STUB = """
extern "C" {
#define EXPORT __attribute__((visibility("default")))
EXPORT long long tilestream_abi() { return 8; }
EXPORT void tilestream_join(void *) {}
EXPORT long long tilestream_usable() { return USABLE; }
EXPORT long long tilestream_tile_shape(long long, long long backward) { return ((backward ? 32LL : 64LL) << 32) | 128; }
EXPORT int tilestream_forward(const void *call) { return *(const int *)call; }
EXPORT int tilestream_backward(const void *) { return 0; }
}
"""

V3 = "fpu avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
AMX = f"{V4} avx512_bf16 amx_tile amx_bf16"

HERE = machine_name()
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the native kernels are not for Windows")
needs_compiler = pytest.mark.skipif(
    not (isas_for(HERE) and any(map(shutil.which, COMPILERS))), reason="needs a C++ compiler and a known processor"
)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "CXX", "TILESTREAM_USE_ZIGLANG", "_PYTHON_HOST_PLATFORM"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Shared libraries of this machine: usable, one that the system refuses, one that lacks every function."""
    folder = tmp_path_factory.mktemp("stubs")
    compiler = next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    built = {}
    for name, text in {"usable": STUB, "refused": STUB.replace("USABLE", "0"), "empty": ""}.items():
        source, output = folder / f"{name}.cpp", folder / f"{name}.so"
        source.write_text(text)
        subprocess.run([compiler, "-DUSABLE=1", "-shared", "-fPIC", str(source), "-o", str(output)], check=True)
        built[name] = output.read_bytes()
    return built


@pytest.fixture
def lib(tmp_path: Path, stubs: dict[str, bytes]) -> Path:
    """A folder with a usable library for every instruction set of x86-64."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for isa in isas_for("x86_64", "linux"):
        (folder / library_name(isa.name)).write_bytes(stubs["usable"])
    return folder


def loader(folder: Path, features: str = AMX, abi: int = ABI) -> Loader:
    return Loader(folder, abi, machine="x86_64", features=frozenset(features.split()))


def chosen(loader: Loader) -> str | None:
    library = loader.library()
    return None if library is None else library.isa


def test_features_are_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: X\nflags\t\t: {V3}\nvmx flags\t: ept\n\nflags\t\t: other\n")
    assert cpu_features(cpuinfo) == frozenset(V3.split())
    assert cpu_features(tmp_path / "missing") == frozenset()


def test_every_instruction_set_has_another_name_and_the_best_needs_most() -> None:
    assert len({isa.name for isa in ISAS}) == len(ISAS)
    x86 = isas_for("x86_64", "linux")
    assert [isa.name for isa in x86] == ["amx", "x86-64-v4", "x86-64-v3"]
    assert x86[0].features > x86[1].features > x86[2].features
    assert [isa.name for isa in isas_for("aarch64", "darwin")] == ["neon"]
    assert isas_for("x86_64", "win32") == isas_for("riscv64", "linux") == ()


@pytest.mark.parametrize(
    ("features", "isa"),
    [(AMX, "amx"), (V4, "x86-64-v4"), (V3, "x86-64-v3"), (V4.replace("avx512vl", ""), "x86-64-v3"), ("sse2", None)],
)
def test_the_best_that_the_processor_has(lib: Path, features: str, isa: str | None) -> None:
    assert chosen(loader(lib, features)) == isa


def test_a_library_can_be_called(lib: Path) -> None:
    found = loader(lib).library()
    assert isinstance(found, Library)
    assert found.path == lib / library_name("amx")
    assert found.forward((7).to_bytes(4, sys.byteorder)) == 7
    assert (found.tile_shape(0, backward=False), found.tile_shape(0, backward=True)) == ((64, 128), (32, 128))


def test_the_environment_names_one(lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "x86-64-v3")
    assert chosen(loader(lib)) == "x86-64-v3"
    monkeypatch.setenv(VARIABLE, "none")
    assert chosen(loader(lib)) is None
    assert loader(lib).reason() == "TILESTREAM_NATIVE_ISA is 'none', which turns the native kernels off"
    monkeypatch.setenv(VARIABLE, "")
    assert chosen(loader(lib)) == "amx"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("avx3", r"TILESTREAM_NATIVE_ISA is 'avx3', which is no instruction set of x86_64. Choose from 'x86-64-v4'"),
        ("neon", "which is no instruction set of x86_64"),
        ("amx", "which needs a processor with amx_bf16, amx_tile, avx512_bf16. Choose from 'x86-64-v4', 'x86-64-v3',"),
    ],
)
def test_the_environment_names_what_cannot_run(
    lib: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    broken = loader(lib, V4)
    for ask in (broken.library, broken.reason):
        with pytest.raises(ArgumentError, match=message):
            ask()
    assert message.partition("which")[2] in dict(broken.report())["in use"]


def test_use_is_undone(lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "x86-64-v4")
    several = loader(lib)
    assert several.runnable() == ("amx", "x86-64-v4", "x86-64-v3")
    with several.use("x86-64-v3") as library:
        assert several.library() is library
        assert library is not None
        assert library.isa == "x86-64-v3"
        with several.use("none") as library:
            assert library is several.library() is None
        with pytest.raises(ArgumentError, match="isa is 'nope', which is no instruction set"), several.use("nope"):
            pass
        assert chosen(several) == "x86-64-v3"
    assert chosen(several) == "x86-64-v4"


def test_a_library_that_cannot_be_used_is_passed_over(lib: Path, stubs: dict[str, bytes], tmp_path: Path) -> None:
    (lib / library_name("amx")).write_bytes(stubs["refused"])
    (lib / library_name("x86-64-v4")).write_bytes(b"not a library")
    some = loader(lib)
    assert chosen(some) == "x86-64-v3"
    assert some.runnable() == ("x86-64-v3",)
    # In another folder: a loaded library that is written over ends the process.
    others = tmp_path / "others"
    others.mkdir()
    for isa, content in (("amx", stubs["refused"]), ("x86-64-v4", b"not a library"), ("x86-64-v3", stubs["empty"])):
        (others / library_name(isa)).write_bytes(content)
    reason = loader(others).reason() or ""
    for part in ("amx is refused by the operating system", "x86-64-v4 cannot be loaded", "x86-64-v3 lacks a function"):
        assert part in reason
    assert "pip install --force-reinstall" in reason


def test_a_library_of_another_version_is_refused(lib: Path) -> None:
    reason = loader(lib, V3, abi=16).reason() or ""
    assert "x86-64-v3 was built by another version (call of 8 bytes, not 16); run `pip install" in reason


def test_reasons_for_having_none(tmp_path: Path) -> None:
    none = loader(tmp_path)
    assert none.library() is None
    assert "were not built (no build has left a record); install g++ or clang, then" in (none.reason() or "")
    entries = {isa.name: {"note": "no C++ compiler was found"} for isa in ISAS}
    (tmp_path / RECORD).write_text(json.dumps({"isas": entries}))
    assert "were not built (no C++ compiler was found); install g++" in (loader(tmp_path).reason() or "")
    assert "processor lacks what the native kernels need: abm, " in (loader(tmp_path, "sse2").reason() or "")
    elsewhere = Loader(tmp_path, ABI, machine="riscv64")
    assert "no native kernels for riscv64" in (elsewhere.reason() or "")
    (tmp_path / RECORD).write_text("[]")
    assert "no build has left a record" in (loader(tmp_path).reason() or "")


# The build.


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that compiles, over a tree whose source is the stub."""
    spec = importlib.util.spec_from_file_location("compile_under_test", ROOT / "build_backend/tilestream_compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = tmp_path / "tree" / module.NATIVE / "src" / "attention.cpp"
    source.parent.mkdir(parents=True)
    source.write_text(STUB.replace("USABLE", "1"))
    monkeypatch.setattr(module, "ROOT", tmp_path / "tree")
    return module


def fake_compiler(folder: Path, name: str, script: str) -> str:
    """A compiler for this machine, whose other answers are those of `script`."""
    path = folder / name
    path.write_text(f'#!/bin/sh\n[ "$1" = -dumpmachine ] && echo {HERE}-linux-gnu && exit 0\n{script}\n')
    path.chmod(0o755)
    return str(path)


def notes(folder: Path) -> dict[str, str]:
    return {name: entry["note"] for name, entry in json.loads((folder / RECORD).read_text())["isas"].items()}


@needs_compiler
def test_libraries_are_compiled_when_out_of_date(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    files = build.build_libraries(folder)
    assert set(files) == set(folder.iterdir())
    assert len(files) >= 2
    ready = Loader(folder, ABI)
    assert ready.reason() is None
    # Nothing changed; then no compiler is left; then the libraries are older than their source.
    libraries = {path: path.stat().st_mtime_ns for path in folder.glob("libtilestream_*")}
    assert build.build_libraries(folder) == files
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.build_libraries(folder) == files
    assert libraries == {path: path.stat().st_mtime_ns for path in folder.glob("libtilestream_*")}
    source = build.sources()[0]
    source.write_text(source.read_text() + "// changed\n")
    assert build.build_libraries(folder) == [folder / RECORD]
    assert set(notes(folder).values()) == {"no C++ compiler was found"}


def test_a_failing_compiler_fails_nothing(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "broken", 'echo "x.cpp:1: error: no room" >&2; exit 1'))
    assert build.build_libraries(tmp_path / "out") == [tmp_path / "out" / RECORD]
    for note in notes(tmp_path / "out").values():
        assert note.endswith("broken failed: x.cpp:1: error: no room")
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    build.build_libraries(tmp_path / "out")
    assert all("missing', which does not work" in note for note in notes(tmp_path / "out").values())


@needs_compiler
@pytest.mark.skipif(HERE != "x86_64", reason="one instruction set on this machine")
def test_a_compiler_that_lacks_the_newest_makes_the_others(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = next(path for path in map(shutil.which, COMPILERS) if path)
    old = f'case "$*" in *-mamx-tile*) echo "error: unknown option -mamx-tile" >&2; exit 1;; esac; exec {real} "$@"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "old", old))
    files = build.build_libraries(tmp_path / "out")
    assert [path.name for path in files] == [library_name("x86-64-v4"), library_name("x86-64-v3"), RECORD]
    assert "unknown option -mamx-tile" in notes(tmp_path / "out")["amx"]


def test_a_compiler_for_another_machine_is_not_used(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "native-g++", "exit 1"))
    other = "aarch64" if HERE == "x86_64" else "x86_64"
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", f"linux-{other}")
    build.build_libraries(tmp_path / "out")
    assert all(f"not for {other}" in note for note in notes(tmp_path / "out").values())


# The build backend.


def in_build_backend(code: str, **environment: str) -> str:
    """What `code` prints, after importing the build backend as `b`."""
    pytest.importorskip("setuptools", minversion="77")
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'build_backend')!r}); import tilestream_build as b; "
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", start + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_ziglang_is_required_when_asked_for() -> None:
    ask = "b.build_meta.get_requires_for_build_wheel = lambda settings: []; print(b.get_requires_for_build_wheel({}))"
    assert in_build_backend(ask.format("None")) == "[]"
    assert in_build_backend(ask.format({"ziglang": "true"})) == "['ziglang']"
    assert in_build_backend(ask.format("None"), TILESTREAM_USE_ZIGLANG="1") == "['ziglang']"


def wheel_of_a_copy(tmp_path: Path, environment: dict[str, str], source: str | None = None) -> Path:
    """The wheel that pip builds of a copy of this tree, with `source` as the kernels if given."""
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("tilestream", "build_backend"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "lib"))
    if source is not None:
        (tree / "tilestream/backends/cpu/native/src/attention.cpp").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(tree),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_for_every_platform(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {**os.environ, "PATH": str(empty)}
    wheel = wheel_of_a_copy(tmp_path, environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = (
        "import tilestream, torch; from tilestream.backends.cpu.native import library; print(tilestream.__file__);"
        "x = torch.randn(1, 5, 2, 8); out = tilestream.attention(x, x, x, backend='cpu'); assert out.isfinite().all();"
        "print(library.reason())"
    )
    environment["PYTHONPATH"] = str(tmp_path / "installed")
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where, reason = done.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    if isas_for(HERE):
        assert "no C++ compiler was found" in reason or "processor lacks" in reason


@pytest.mark.slow
@needs_compiler
def test_with_a_compiler_the_wheel_has_the_libraries(tmp_path: Path) -> None:
    wheel = wheel_of_a_copy(tmp_path, dict(os.environ), STUB.replace("USABLE", "1"))
    names = {Path(name).name for name in zipfile.ZipFile(wheel).namelist()}
    assert {"attention.cpp", "call.h", RECORD} <= names
    assert library_name(isas_for(HERE)[-1].name) in names
    assert "-py3-none-" in wheel.name
    assert "-any" not in wheel.name
