# SPDX-License-Identifier: Apache-2.0
"""Build the C++ core of rematfn: ``rematfn/_C_torch2_13.*.so`` is the one for torch 2.13.

Everything that does not depend on the build is in pyproject.toml. torch is not in its
``build-system.requires``, and on purpose: the core uses torch's C++ interface, which promises
nothing from one minor version to the next, so it must be compiled against the torch it will run
with. A build-time requirement would fetch another copy of torch into a throw-away environment and
compile against that one. Hence ``pip install --no-build-isolation .`` in an environment with torch.

A wheel for others holds a core for each torch (``make wheels``): ``REMATFN_TORCHES`` names their
folders, which need hold no more than headers, libraries and ``version.py``. torch is never
imported here.
"""

import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext

MIN_TORCH = (2, 11)
# The first that reads the licence in pyproject.toml. Below 70.1 none makes wheels by itself.
MIN_SETUPTOOLS = 77
# The two builds of `make fast`: "generate", then the folder of what was counted. That does for
# other versions of torch and Python, too (`make wheels`), but for functions that differ there.
PROFILE = os.environ.get("REMATFN_PROFILE")
COUNTS = PROFILE == "generate"
INSTALL = "pip install --no-build-isolation ."
NO_TORCH = (
    f"rematfn: building needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, and the Python at "
    f"{sys.executable} cannot import it. If pip is building in an isolated environment, torch is "
    f"hidden from it. Install torch first, then run `{INSTALL}`."
)
NO_PROFILE = (
    "rematfn: a build by a profile (`make fast`) needs GCC, and {compiler} is not. Name it in CXX."
)
NO_COMPILER = (
    "rematfn: building needs a C++20 compiler, and none was found (tried {tried}). Install one, "
    "for example with `apt-get install g++` or `dnf install gcc-c++`, or name yours in the "
    "environment variable CXX; then run the same command again."
)
OLD_TORCH = "rematfn: torch {running} is too old, {needed} or newer is needed. Upgrade torch first."
# torch 2.11 and 2.12 refuse those from 82 on.
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


def find_torches() -> dict[tuple[int, int], tuple[str, Path]]:
    """Return, by minor version, each torch to build for: its whole version, and its folder."""
    named = os.environ.get("REMATFN_TORCHES")
    if named:
        folders = [Path(folder).resolve() for folder in named.split(os.pathsep)]
    else:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            sys.exit(NO_TORCH)
        folders = [Path(spec.origin).parent]
    found = {}
    for folder in folders:
        text = (folder / "version.py").read_text(encoding="utf-8")
        version = re.search(r"^__version__ = '([^'+]+)", text, re.M)[1]
        minor = tuple(map(int, version.split(".")[:2]))
        if minor < MIN_TORCH:
            sys.exit(OLD_TORCH.format(running=version, needed=".".join(map(str, MIN_TORCH))))
        found[minor] = (version, folder)
    return dict(sorted(found.items()))


def requirement(minors: list[tuple[int, int]]) -> str:
    """Return what a package with cores for these minor versions of torch, in order, requires."""
    if len(minors) == 1:  # with its pre-releases, as one of them may have been built with
        return "torch=={}.{}.*".format(*minors[0])
    (major, first), (_, last) = minors[0], minors[-1]
    without = [n for n in range(first, last) if (major, n) not in minors]
    skipped = "".join(f",!={major}.{n}.*" for n in without)
    return f"torch>={major}.{first},<{major}.{last + 1}{skipped}"


def is_gcc(compiler: str) -> bool:
    """Return whether a compiler is GCC, which optimises at link time with any linker."""
    command = [*shlex.split(compiler), "--version"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return "Free Software Foundation" in asked.stdout


def flags(compiler: str) -> tuple[list[str], list[str]]:
    """Return the arguments for compiling and for linking; exit if there can be no profile."""
    # -MMD writes down which files were read, for `is_current`.
    compile_args = ["-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", "-MMD"]
    sanitize = os.environ.get("REMATFN_SANITIZE")  # such as "address,undefined"
    if sanitize:
        sanitizers = [f"-fsanitize={sanitize}"]
        return [*compile_args, *sanitizers, "-O1", "-g", "-fno-omit-frame-pointer"], sanitizers
    # GCC 12 removes a store as dead where, as an exception passes, nothing but a loop of stores
    # comes after it: `tests/project/way_out.cpp`. A level stayed in the middle of its replays.
    optimise = ["-O2", "-fno-tree-dse", "-g0", "-fvisibility-inlines-hidden", "-fno-plt"]
    if PROFILE and not is_gcc(compiler):
        sys.exit(NO_PROFILE.format(compiler=compiler))
    if is_gcc(compiler) and not os.environ.get("REMATFN_SEPARATE"):
        # What an operator passes in a level does not fit into a processor's cache of instructions,
        # so what matters is what is inlined, and that what is rare lies elsewhere.
        optimise += ["-flto=auto", "--param=builtin-expect-probability=100"]
        if COUNTS:
            optimise += ["-fprofile-generate", "-fprofile-update=prefer-atomic"]
        elif PROFILE:
            optimise += ["-fprofile-use", "-fprofile-partial-training"]
            optimise += ["-fprofile-correction"]  # threads count side by side
            optimise += ["-Wno-missing-profile", "-Wno-coverage-mismatch"]
    return [*compile_args, *optimise], optimise


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


def core(
    minor: tuple[int, int], version: str, torch: Path, sources: list[str]
) -> setuptools.Extension:
    """Describe the core for one torch, as `rematfn/_interop/compat.py` looks for it."""
    includes = [torch / "include", torch / "include/torch/csrc/api/include"]
    # As system folders: warnings are then about our code only.
    compile_args = [f"-isystem{path}" for path in includes]
    compile_args.append(f"-ffile-prefix-map={torch.parent}/=")  # messages name no folder of ours
    described = setuptools.Extension(
        "rematfn._C_torch{}_{}".format(*minor),
        sources,
        depends=sorted(path.as_posix() for path in Path("csrc").rglob("*.[ch]*")),  # for the sdist
        include_dirs=["csrc", "csrc/third_party_shims"],
        define_macros=[("REMATFN_BUILT_TORCH", f'"{version}"')],
        library_dirs=[str(torch / "lib")],
        libraries=["c10", "torch", "torch_cpu", "torch_python"],
        extra_compile_args=compile_args,
        language="c++",
    )
    described.torch_version = version
    return described


def is_current(product: Path) -> bool:
    """Return whether a compiled unit is newer than all that it was compiled from."""
    record = product.with_suffix(".d")
    if PROFILE or not (product.exists() and record.exists()):
        return False
    read = shlex.split(record.read_text(encoding="utf-8").partition(":")[2].replace("\\\n", " "))
    sources = [Path("setup.py"), *map(Path, read)]
    made = product.stat().st_mtime
    return all(path.exists() and path.stat().st_mtime < made for path in sources)


def remove_others(built: set[Path]) -> None:
    """Remove the cores for this Python that lie beside those that were built."""
    for folder in {path.parent for path in built}:
        for other in set(folder.glob(f"_C*{importlib.machinery.EXTENSION_SUFFIXES[0]}")) - built:
            other.unlink()


class BuildCores(build_ext):
    """Compile as many units at a time as there are processors, or ``MAX_JOBS``."""

    def finalize_options(self):
        """Have each core linked again: what has to be compiled is found unit by unit."""
        super().finalize_options()
        self.force = True

    def run(self):
        """Build, and remove the cores that an earlier build left there, of other sources."""
        os.environ["CXX"] = find_compiler()
        compile_args, link_args = flags(os.environ["CXX"])
        for built in self.extensions:
            built.extra_compile_args += compile_args
            built.extra_link_args += link_args
        super().run()
        remove_others({Path(self.get_ext_fullpath(built.name)) for built in self.extensions})

    def build_extensions(self):
        """Compile for others without the flags of this Python, which may name folders of its own.

        All Pythons then have the same commands, and a compiler cache has most units of the next.
        """
        if os.environ.get("REMATFN_TORCHES"):
            compiler = os.environ["CXX"]
            self.compiler.set_executables(
                compiler_so_cxx=f"{compiler} -DNDEBUG -fPIC -fwrapv",
                linker_so_cxx=f"{compiler} -shared",
            )
        super().build_extensions()

    def build_extension(self, ext):
        """Compile into one folder for every way to build, an editable installation's too."""
        self.build_temp = f"build/{sys.implementation.cache_tag}-torch-{ext.torch_version}"
        if sanitizers := os.environ.get("REMATFN_SANITIZE"):
            self.build_temp += f"-{sanitizers.replace(',', '-')}"
        if PROFILE:  # nothing that counts is linked into another build
            self.build_temp = "build/profile" if COUNTS else f"{self.build_temp}-profile"
        compile_all = self.compiler.compile

        def compile_one(source: str, **options) -> list[str]:
            [product] = self.compiler.object_filenames([source], output_dir=self.build_temp)
            if is_current(Path(product)):
                return [product]
            if PROFILE and not COUNTS:  # GCC looks for it there
                counted = Path(product).with_suffix(".gcda")
                counted.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(PROFILE, counted.name), counted)
            return compile_all([source], **options)

        def compile_side_by_side(sources, **options) -> list[str]:
            jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
            with ThreadPoolExecutor(jobs) as pool:
                made = pool.map(lambda source: compile_one(source, **options), sources)
                return [product for products in made for product in products]

        self.compiler.compile = compile_side_by_side
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_all


def main() -> None:
    """Describe the cores and hand over to setuptools."""
    if int(setuptools.__version__.split(".")[0]) < MIN_SETUPTOOLS:
        sys.exit(OLD_SETUPTOOLS.format(running=setuptools.__version__))
    torches = find_torches()
    sources = units()
    setuptools.setup(
        ext_modules=[core(minor, *torch, sources) for minor, torch in torches.items()],
        cmdclass={"build_ext": BuildCores},
        install_requires=["optree>=0.13", requirement(list(torches))],
    )


if __name__ == "__main__":  # setuptools runs this file as __main__; the tests import it
    main()
