# SPDX-License-Identifier: Apache-2.0
"""Build the C++ core of rematfn, the extension ``rematfn._C``.

Everything that does not depend on the build is in pyproject.toml. torch is not in its
``build-system.requires``, and on purpose: the extension uses torch's C++ interface, which promises
nothing from one minor version to the next, so it must be compiled against the torch it will run
with. A build-time requirement would fetch another copy of torch into a throw-away environment and
compile against that one. Hence ``pip install --no-build-isolation .`` in an environment with torch.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import setuptools

MIN_TORCH = (2, 12)
# The first that reads the licence in pyproject.toml. Below 70.1 none makes wheels by itself.
MIN_SETUPTOOLS = 77
INSTALL = "pip install --no-build-isolation ."
NO_TORCH = (
    f"rematfn: building needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, and the Python at "
    f"{sys.executable} cannot import it. If pip is building in an isolated environment, torch is "
    f"hidden from it. Install torch first, then run `{INSTALL}`."
)
NO_COMPILER = (
    "rematfn: building needs a C++20 compiler, and none was found (tried {tried}). Install one, "
    "for example with `apt-get install g++` or `dnf install gcc-c++`, or name yours in the "
    "environment variable CXX; then run the same command again."
)
OLD_TORCH = "rematfn: torch {running} is too old, {needed} or newer is needed. Upgrade torch first."
# torch 2.12 refuses those from 82 on.
OLD_SETUPTOOLS = (
    f"rematfn: building needs setuptools {MIN_SETUPTOOLS} or newer, and {{running}} is installed. "
    f"Run `pip install 'setuptools>={MIN_SETUPTOOLS},<82'`, then `{INSTALL}` again."
)


def find_compiler() -> str:
    """Return the command of the C++ compiler; exit with a readable message if there is none."""
    configured = sysconfig.get_config_var("CXX") or "c++"
    named = os.environ.get("CXX")
    tried = [named] if named else [configured, "c++", "g++", "clang++"]
    for command in tried:
        if shutil.which(shlex.split(command)[0]):
            return command
    sys.exit(NO_COMPILER.format(tried=", ".join(dict.fromkeys(tried))))


def flags(torch_includes: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments for compiling and for linking."""
    # A folder given with -isystem is searched as a system folder even though torch also gives it
    # with -I: warnings are then about our code only.
    compile_args = [f"-isystem{path}" for path in torch_includes]
    compile_args += ["-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra"]
    sanitize = os.environ.get("REMATFN_SANITIZE")  # such as "address,undefined"
    if not sanitize:
        return [*compile_args, "-O2", "-g0"], []
    sanitizers = [f"-fsanitize={sanitize}"]
    return [*compile_args, *sanitizers, "-O1", "-g", "-fno-omit-frame-pointer"], sanitizers


def units() -> list[str]:
    """Return what to compile: a unit for each folder of csrc/, or each source for developers.

    torch's headers take longer to compile than our sources, so those who install read them once a
    folder. ``REMATFN_SEPARATE=1`` (``make build``) compiles again only what has changed.
    """
    sources = sorted(Path("csrc").rglob("*.cpp"))
    if os.environ.get("REMATFN_SEPARATE"):
        return [path.as_posix() for path in sources]
    written = []
    # The bindings first: they take the longest to compile, and the last unit is compiled alone.
    folders = {path.parent for path in sources}
    for folder in sorted(folders, key=lambda path: (path.name != "python", path.name)):
        members = [path.relative_to("csrc") for path in sources if path.parent == folder]
        text = "".join(f'#include "{member.as_posix()}"\n' for member in members)
        unit = Path("build/units", f"{folder.name}.cpp")
        unit.parent.mkdir(parents=True, exist_ok=True)
        if not unit.exists() or unit.read_text() != text:  # what is written anew is compiled anew
            unit.write_text(text)
        written.append(unit.as_posix())
    return written


def main() -> None:
    """Describe the extension and hand over to setuptools."""
    if int(setuptools.__version__.split(".")[0]) < MIN_SETUPTOOLS:
        sys.exit(OLD_SETUPTOOLS.format(running=setuptools.__version__))
    try:
        import torch
    except ModuleNotFoundError:
        sys.exit(NO_TORCH)

    version = torch.__version__.split("+")[0]
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < MIN_TORCH:
        sys.exit(OLD_TORCH.format(running=version, needed=".".join(map(str, MIN_TORCH))))
    from torch.utils import cpp_extension  # has a word to say about CUDA

    class BuildExtension(cpp_extension.BuildExtension):
        """Compile with ninja if it is there, and note which torch the result belongs to."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, use_ninja=cpp_extension.is_ninja_available(), **kwargs)

        def initialize_options(self):
            super().initialize_options()
            # One folder for every way to build, an editable installation's throw-away one too, so
            # that only what has changed is compiled again.
            self.build_temp = f"build/{sys.implementation.cache_tag}-torch-{version}"
            if sanitizers := os.environ.get("REMATFN_SANITIZE"):
                self.build_temp += f"-{sanitizers.replace(',', '-')}"

        def run(self):
            os.environ["CXX"] = find_compiler()
            super().run()
            # rematfn._interop.compat reads this before it loads the extension.
            beside = Path(self.get_ext_fullpath("rematfn._C")).with_name("_built_with.py")
            beside.write_text(f'"""Written by setup.py."""\n\nTORCH = "{version}"\n')

    compile_args, link_args = flags(cpp_extension.include_paths())
    extension = cpp_extension.CppExtension(
        "rematfn._C",
        units(),
        depends=sorted(path.as_posix() for path in Path("csrc").rglob("*.[ch]*")),  # units too
        include_dirs=[str(Path("csrc").resolve()), str(Path("csrc/third_party_shims").resolve())],
        define_macros=[("REMATFN_BUILT_TORCH", f'"{version}"')],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )
    setuptools.setup(
        ext_modules=[extension],
        cmdclass={"build_ext": BuildExtension},
        install_requires=["optree>=0.13", f"torch=={major}.{minor}.*"],
    )


if __name__ == "__main__":  # setuptools runs this file as __main__; the tests import it
    main()
