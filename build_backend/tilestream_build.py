"""The build backend: setuptools, which also compiles the native CPU kernels (tilestream_compile.py) on its way.

pyproject.toml names this module as the backend, and its classes as setuptools commands. A wheel with libraries in it is
for one platform and every Python 3; one without, because no compiler was found, is for every platform. An editable
installation has its libraries in the source tree.

`pip install . --config-settings=ziglang=true` (or TILESTREAM_USE_ZIGLANG=1) compiles with PyPI's ziglang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import tilestream_compile
from setuptools import Command, build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.bdist_wheel import bdist_wheel, get_platform
from setuptools.command.build import build

__all__ = [
    "BdistWheel",
    "Build",
    "BuildNative",
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# pip's --config-settings; None without any.
Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """ziglang, where the user asks for it: no other package is needed for the native kernels."""
    _take(config_settings)
    requires: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    return [*requires, "ziglang"] if tilestream_compile.uses_ziglang() else requires


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """As setuptools does it."""
    _take(config_settings)
    return str(build_meta.build_wheel(directory, config_settings, metadata_directory))


def build_editable(directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """As setuptools does it."""
    _take(config_settings)
    return str(build_meta.build_editable(directory, config_settings, metadata_directory))


def _take(config_settings: Settings) -> None:
    """A setting becomes the environment variable of the same meaning: commands see the environment alone."""
    if config_settings and "ziglang" in config_settings:
        os.environ[tilestream_compile.ZIGLANG] = str(config_settings["ziglang"])


class Build(build):
    """`build`, with the native kernels as one more part."""

    sub_commands: ClassVar[list[tuple[str, Any]]] = [*build.sub_commands, ("build_native", None)]


class BuildNative(Command):
    """Compiles the native kernels; has the methods that setuptools asks of a part of `build`."""

    description = "compile the native CPU kernels"
    user_options: ClassVar[list[tuple[str, str, str]]] = []
    build_lib: str
    editable_mode: bool

    def initialize_options(self) -> None:
        """Nothing is known yet."""
        self.build_lib = ""
        self.editable_mode = False
        self.files: list[Path] = []

    def finalize_options(self) -> None:
        """Where `build_py` puts the package, the libraries go too."""
        self.build_lib = self.get_finalized_command("build_py").build_lib

    def run(self) -> None:
        """Compile."""
        tree = tilestream_compile.ROOT if self.editable_mode else Path(self.build_lib)
        self.files = tilestream_compile.build_libraries(tree / tilestream_compile.NATIVE / "lib")

    def get_source_files(self) -> list[str]:
        """What a source distribution needs to build."""
        files = [*tilestream_compile.sources(), *Path(__file__).resolve().parent.glob("*.py")]
        return [file.relative_to(tilestream_compile.ROOT).as_posix() for file in files]

    def get_outputs(self) -> list[str]:
        """The files of this build, as they lie in a wheel's tree."""
        return [str(self._in_wheel(file)) for file in self.files]

    def get_output_mapping(self) -> dict[str, str]:
        """Of an editable build: where in the source tree each file is."""
        return {str(self._in_wheel(file)): str(file) for file in self.files} if self.editable_mode else {}

    def _in_wheel(self, file: Path) -> Path:
        return Path(self.build_lib) / tilestream_compile.NATIVE / "lib" / file.name


class BdistWheel(bdist_wheel):
    """`bdist_wheel`, whose tag names the platform if there are libraries, and neither a Python version nor an ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        """For example py3-none-linux_x86_64; for py3-none-any pip takes it everywhere."""
        python, abi, platform = super().get_tag()
        has_libraries = any((Path(self.bdist_dir) / tilestream_compile.NATIVE / "lib").glob("libtilestream_*"))
        if has_libraries and not self.plat_name_supplied:
            platform = get_platform(self.bdist_dir).replace("-", "_").replace(".", "_")
        return python, abi, platform
