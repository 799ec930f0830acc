"""The native kernels without Python around them: tests/native/harness.cpp, with sanitizers and against the libraries.

CONTRIBUTING.md says how to run it under ThreadSanitizer, valgrind and an emulator too (`make check-native`).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tilestream.backends.cpu.native.isa import Isa, cpu_features, isas_for, library_name, machine_name

ROOT = Path(__file__).parent.parent
HARNESS = ROOT / "tests" / "native" / "harness.cpp"
HERE = isas_for(machine_name())
# No -fsanitize-recover: the first finding ends the process.
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")
CANNOT_RUN = 77

pytestmark = pytest.mark.skipif(not HERE, reason="there are no native kernels for this machine and system")


def runnable(isa: Isa) -> bool:
    return isa.features <= cpu_features()


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_for_harness", ROOT / "build_backend/tilestream_compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compilers(build: ModuleType) -> Sequence[Any]:
    found, note = build._find_compilers(machine_name())
    if not found:
        pytest.skip(note)
    return found


def compiled(compiler: Any, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*compiler.command, "-std=c++20", "-pthread", *map(str, arguments), "-lm"]
    return subprocess.run(command, capture_output=True, text=True)


def check(program: Path, calls: int) -> None:
    done = subprocess.run([program, str(calls)], capture_output=True, text=True, timeout=600)
    if done.returncode == CANNOT_RUN:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-6000:]


@pytest.mark.slow
def test_sanitizers_find_nothing(build: ModuleType, compilers: Sequence[Any], tmp_path: Path) -> None:
    """AddressSanitizer sees no tile load or store of AMX: those are single instructions to it."""
    nothing = tmp_path / "nothing.cpp"
    nothing.write_text("int main() {}\n")
    probe = (*SANITIZERS, nothing, "-o", tmp_path / "nothing")
    compiler = next((found for found in compilers if compiled(found, *probe).returncode == 0), None)
    if compiler is None:
        pytest.skip("no compiler here has the runtime of AddressSanitizer and UBSan")
    options = [flag for flag in build._FLAGS if flag not in ("-shared", "-O3")]
    source, program = ROOT / build.NATIVE / "src" / "attention.cpp", tmp_path / "harness"
    errors = []
    for isa in filter(runnable, HERE):
        processor = isa.zig_flags if compiler.is_zig else isa.flags
        done = compiled(compiler, *options, *SANITIZERS, *processor, HARNESS, source, "-o", program)
        if done.returncode == 0:
            return check(program, calls=80)
        errors.append(done.stderr)  # an old compiler may not know the best
    pytest.fail("\n".join(errors)[-6000:])


@pytest.fixture(scope="module")
def libraries(build: ModuleType, compilers: Sequence[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The libraries as they are installed: those of the source tree where they are up to date, else made now."""
    folder = tmp_path_factory.mktemp("native") / "lib"
    if (ROOT / build.NATIVE / "lib").exists():
        shutil.copytree(ROOT / build.NATIVE / "lib", folder)
    build.build_libraries(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("isa", HERE, ids=lambda isa: isa.name)
def test_the_library_is_right(isa: Isa, libraries: Path, compilers: Sequence[Any], tmp_path: Path) -> None:
    library = libraries / library_name(isa.name)
    if not runnable(isa):
        pytest.skip(f"this processor lacks {', '.join(sorted(isa.features - cpu_features()))}")
    if not library.exists():
        pytest.skip(f"no compiler here knows {isa.name}")
    done = compiled(compilers[0], "-O2", HARNESS, library, f"-Wl,-rpath,{libraries}", "-o", tmp_path / "harness")
    assert done.returncode == 0, done.stderr
    check(tmp_path / "harness", calls=300)


@pytest.mark.slow
def test_the_threads_of_openmp_do_as_well(libraries: Path, compilers: Sequence[Any], tmp_path: Path) -> None:
    """Where PyTorch's threads are GNU OpenMP's, the kernels run on them (`tilestream_join`)."""
    library = next(
        (path for isa in HERE if runnable(isa) and (path := libraries / library_name(isa.name)).exists()), None
    )
    if library is None:
        pytest.skip("no compiler here made a library for this processor")
    options = ("-O2", "-DJOIN_OPENMP", HARNESS, library, f"-Wl,-rpath,{libraries}", "-lgomp")
    done = compiled(compilers[0], *options, "-o", tmp_path / "harness")
    if done.returncode != 0 and "gomp" in done.stderr:
        pytest.skip("the compiler has no libgomp")
    assert done.returncode == 0, done.stderr
    check(tmp_path / "harness", calls=60)


# ---- the inner loops, as the compiler made them
class Loop(NamedTuple):
    """An innermost loop with FMAs: its function, and the instructions in it that touch the stack."""

    function: str
    stack: list[str]


def functions(disassembly: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Name, and (address, instruction)."""
    for part in re.split(r"\n(?=[0-9a-f]+ <.*>:\n)", disassembly):
        head, _, body = part.partition("\n")
        name = re.search(r"<(.*)>:$", head)
        lines = (re.match(r"\s*([0-9a-f]+):\s+(\S.*)", line) for line in body.splitlines())
        if name:
            yield name[1], [(int(line[1], 16), line[2]) for line in lines if line]


def fma_loops(disassembly: str, name: str) -> list[Loop]:
    """The innermost loops with FMAs of all functions with `name` in theirs."""
    loops = []
    for function, code in functions(disassembly):
        if name not in function:
            continue
        # rbp is a pointer like any other unless the function keeps its frame there.
        has_frame = any(re.search(r"mov\s+%rsp,%rbp", text) for _, text in code)
        stack = re.compile(r"\(%rsp|\[sp|\[x29" + (r"|\(%rbp" if has_frame else ""))
        jump_to = re.compile(r"(?:j\w+|b\.?\w*|cbn?z|tbn?z)\s.*?\b([0-9a-f]+) <")
        jumps = [(address, jump_to.match(text)) for address, text in code]
        spans = [(int(jump[1], 16), address) for address, jump in jumps if jump and int(jump[1], 16) <= address]
        for low, high in set(spans):
            if any(low <= other[0] and other[1] <= high for other in spans if other != (low, high)):
                continue
            inside = [text for address, text in code if low <= address <= high]
            if any(re.match(r"vfmadd|fmla|fmadd", text) for text in inside):
                loops.append(Loop(function, [text for text in inside if stack.search(text)]))
    return loops


CONTROL = """
0000000000001000 <_Z7productv>:
    1000:	{frame}
    1004:	vmovaps %zmm3,-0x40(%rsp)
    1008:	vmovups (%rbp),%zmm2
    100c:	vfmadd231ps %zmm2,%zmm1,%zmm3
    1010:	{inside}
    1018:	cmp    %rcx,%rax
    101c:	jne    1008 <_Z7productv+0x8>
    1020:	vmovaps -0x40(%rsp),%zmm3
    1024:	jmp    1000 <_Z7productv>
    1028:	ret

0000000000002000 <_Z5otherv>:
    2000:	vfmadd231ps 0x40(%rsp),%zmm1,%zmm3
    2008:	jne    2000 <_Z5otherv>
"""


@pytest.mark.parametrize(
    ("frame", "inside", "found"),
    [
        ("nop", "add    $0x40,%rax", []),
        ("nop", "vmovaps %zmm3,0x40(%rsp)", ["vmovaps %zmm3,0x40(%rsp)"]),
        ("nop", "vfmadd231ps -0x80(%rsp),%zmm1,%zmm4", ["vfmadd231ps -0x80(%rsp),%zmm1,%zmm4"]),
        ("mov    %rsp,%rbp", "nop", ["vmovups (%rbp),%zmm2"]),
    ],
)
def test_a_spill_is_seen(frame: str, inside: str, found: list[str]) -> None:
    """Inside the innermost loop of the named function, and nowhere else."""
    assert fma_loops(CONTROL.format(frame=frame, inside=inside), "product") == [Loop("_Z7productv", found)]


@pytest.mark.slow
@pytest.mark.parametrize("isa", HERE, ids=lambda isa: isa.name)
def test_no_accumulator_is_spilled(isa: Isa, libraries: Path) -> None:
    """One that is costs a third of the speed, and no result shows it."""
    library = libraries / library_name(isa.name)
    if sys.platform == "darwin" or shutil.which("objdump") is None:
        pytest.skip("needs binutils' objdump")
    if not library.exists():
        pytest.skip(f"no compiler here knows {isa.name}")
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(library)]
    loops = fma_loops(subprocess.run(command, capture_output=True, text=True, check=True).stdout, "product")
    # Scores, scores with maxima, both ways to accumulate, and the two loops of the outer product.
    assert len(loops) >= 5
    assert [loop for loop in loops if loop.stack] == []
