"""Ways in which people copy folders, and what becomes of a run's folder on the way.

Each takes the folder of a copy, and alters it as that way does.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

__all__ = ["DAMAGE", "HARMLESS"]

Way = Callable[[Path], object]

CHECKPOINT = "checkpoints/00000000.safetensors"
LOG = "chips/lab-chip-0000/log.bin"


def beside(*paths: str | bytes, content: bytes = b"{}") -> Way:
    """Somebody's tool leaves files: a path that ends with a slash is an empty folder."""

    def leave(run: Path) -> None:
        for path in paths:
            place = run / os.fsdecode(path)
            if os.fsdecode(path).endswith("/"):
                place.mkdir(parents=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)

    return leave


def archived(kind: str) -> Way:
    def pack(run: Path) -> None:
        packed = shutil.make_archive(str(run.with_name("packed")), kind, run)
        shutil.rmtree(run)
        shutil.unpack_archive(packed, run)

    return pack


def _git(place: Path, *words: str) -> None:
    names = ["-c", "user.name=lab", "-c", "user.email=lab@example.org", "-c", "core.hooksPath=/dev/null"]
    subprocess.run(["git", *names, *words], cwd=place, check=True, capture_output=True)


def cloned(*options: str) -> Way:
    def clone(run: Path) -> None:
        _git(run, "init", "-q")
        _git(run, "add", "-A")
        _git(run, "commit", "-q", "-m", "run")
        kept = run.with_name("kept")
        run.rename(kept)
        _git(kept.parent, *options, "clone", "-q", str(kept), str(run))

    return clone


def in_a_store(run: Path) -> None:
    """Object storage knows keys and no folders: empty ones are lost, and a marker stands for each other."""
    objects = {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    folders = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_dir()}
    shutil.rmtree(run)
    beside("_SUCCESS", *(f"{folder}/.keep" for folder in folders))(run)
    for key, content in objects.items():
        (run / key).parent.mkdir(parents=True, exist_ok=True)
        (run / key).write_bytes(content)
        (run / f"{key}.metadata").write_bytes(b"etag")


def annexed(run: Path) -> None:
    """git-annex and DVC keep contents in a store inside the folder, and links in their places."""
    store = run / ".git" / "annex"
    store.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in run.rglob("*") if path.is_file())):
        path.rename(store / str(number))
        path.symlink_to(os.path.relpath(store / str(number), path.parent))


def folders_linked(run: Path) -> None:
    for folder in [path for path in run.iterdir() if path.is_dir()]:
        folder.rename(run / f".{folder.name}.real")
        folder.symlink_to(f".{folder.name}.real")


def hard_linked(run: Path) -> None:
    for path in [path for path in run.rglob("*") if path.is_file()]:
        os.link(path, run.with_name("spare"))
        path.unlink()
        run.with_name("spare").rename(path)


def each(change: Callable[[Path], object]) -> Way:
    """Something that befalls every file and folder."""
    return lambda run: [change(path) for path in sorted(run.rglob("*"), reverse=True)]


def renamed(name: str) -> Way:
    """The whole folder has another name on the way, and its own again at the end."""
    return lambda run: run.rename(run.with_name(name)).rename(run)


def special(run: Path) -> None:
    os.mkfifo(run / "pipe")
    (run / "link").symlink_to("/etc/passwd")
    (run / "round").symlink_to("round")
    (run / "nowhere").symlink_to("/nowhere")


def into_itself(run: Path) -> None:
    shutil.copytree(run, run.with_name("twice"))
    run.with_name("twice").rename(run / run.name)


def many(run: Path) -> None:
    beside(*(f".nfs{number:024d}" for number in range(500)))(run)


HARMLESS: dict[str, Way] = {
    "a Mac's Finder": beside(".DS_Store", "chips/.DS_Store", "logs/.DS_Store"),
    "a Mac's archive": beside("._metadata.json", "data/._salt.bin", "__MACOSX/._run"),
    "Spotlight and bins": beside(".Spotlight-V100/", ".Trashes/", ".fseventsd/x", ".TemporaryItems/"),
    "Icon": beside("Icon\r"),
    "a Windows folder": beside("Thumbs.db", "desktop.ini", "data/Thumbs.db", "$RECYCLE.BIN/x"),
    "a Windows volume": beside("System Volume Information/x"),
    "alternate streams": beside("metadata.json:Zone.Identifier"),
    "NFS": beside(".nfs00000000c0ffee00000001"),
    "many of NFS": many,
    "FUSE": beside(".fuse_hidden0000000100000001"),
    "ext4": beside("lost+found/"),
    "a Synology": beside("@eaDir/x", "chips/@eaDir/y"),
    "a snapshot's folder": beside(".snapshot/", ".zfs/"),
    "git's folder": beside(".git/HEAD", ".gitignore", ".gitattributes"),
    "Subversion": beside(".svn/entries", "data/.svn/entries"),
    "DVC": beside(".dvc/config", "data.dvc"),
    "Syncthing": beside(".stfolder/", ".stversions/x", "~syncthing~metadata.json.tmp"),
    "Dropbox": beside(".dropbox", ".dropbox.attr", "metadata (conflicted copy).json"),
    "OneDrive": beside(".849C9593-D756-4E56-8D6E-42412F2A707B"),
    "rsync": beside(".rsync-partial/x", ".metadata.json.Xa81bq"),
    "a download": beside("metadata (1).json", "journal.tsv.part", "log.bin.crdownload"),
    "Emacs": beside("metadata.json~", "#metadata.json#", ".#journal.tsv"),
    "vim": beside(".metadata.json.swp"),
    "a backup": beside("manifest.json.bak", "journal.tsv.orig"),
    "Jupyter": beside(".ipynb_checkpoints/"),
    "Python": beside("__pycache__/x.pyc"),
    "digests": beside("SHA256SUMS", "MANIFEST.sha256"),
    "empty folders": beside("empty/", "chips/empty/", "batches/"),
    "a note in a chip's folder": beside("chips/lab-chip-0000/README.txt"),
    "a name of bytes": beside(b"\xff\xfe\n\x1b[31m"),
    "pipes and links beside": special,
    "a copy in itself": into_itself,
    "tar": archived("tar"),
    "tar and gzip": archived("gztar"),
    "tar and xz": archived("xztar"),
    "zip": archived("zip"),
    "git": cloned(),
    "object storage": in_a_store,
    "git-annex": annexed,
    "folders that are links": folders_linked,
    "hard links": hard_linked,
    "another owner": each(lambda path: path.chmod(0o555 if path.is_dir() else 0o444)),
    "a FAT disk's rights": each(lambda path: path.chmod(0o777)),
    "a clock of 1980": each(lambda path: os.utime(path, (315532800, 315532800))),
    "a clock of 2106": each(lambda path: os.utime(path, (4294967295, 4294967295))),
    "a name with blanks": renamed("a run\twith blanks"),
    "a name in capitals": renamed("RUN"),
}
"""Names of ways, all of which leave a copy that is as good as the run."""


def cut(path: str, length: int | None = None) -> Way:
    def shorten(run: Path) -> None:
        size = (run / path).stat().st_size
        os.truncate(run / path, size // 2 if length is None else length)

    return shorten


def edited(path: str, edit: Callable[[bytes], bytes]) -> Way:
    return lambda run: (run / path).write_bytes(edit((run / path).read_bytes()))


def without(path: str) -> Way:
    return lambda run: shutil.rmtree(run / path) if (run / path).is_dir() else (run / path).unlink()


def upper(run: Path) -> None:
    each(lambda path: path.rename(path.with_name(path.name.upper())))(run)


def text_mode(run: Path) -> None:
    for path in [path for path in run.rglob("*") if path.is_file()]:
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def broken_off(run: Path) -> None:
    """A transfer in the order of names ends in the middle of a file."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    at = files.index(run / "journal.tsv")
    os.truncate(files[at], files[at].stat().st_size // 2)
    for path in files[at + 1 :]:
        path.unlink()


def exchanged(run: Path) -> None:
    one, other = run / "checkpoints/00000000.safetensors", run / "checkpoints/00000001.safetensors"
    one.rename(run / "spare")
    other.rename(one)
    (run / "spare").rename(other)


def led_out(path: str) -> Way:
    def link(run: Path) -> None:
        kept = run.with_name("kept")
        (run / path).rename(kept)
        (run / path).symlink_to(kept)

    return link


def in_folder(run: Path) -> None:
    (run / "metadata.json").unlink()
    (run / "metadata.json").mkdir()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n"

DAMAGE: dict[str, tuple[str, Way]] = {
    "CRLF": ("journal.tsv", edited("journal.tsv", lambda data: data.replace(b"\n", b"\r\n"))),
    "git with CRLF": ("journal.tsv", cloned("-c", "core.autocrlf=true")),
    "a transfer as text": ("journal.tsv", text_mode),
    "a mark of byte order": ("metadata.json", edited("metadata.json", lambda data: b"\xef\xbb\xbf" + data)),
    "a last newline": ("manifest.json", edited("manifest.json", lambda data: data + b"\n")),
    "another manifest's layout": ("manifest.json", edited("manifest.json", lambda data: data.replace(b",", b", "))),
    "upper case": ("manifest.json", upper),
    "upper case of one": ("metadata.json", lambda run: (run / "metadata.json").rename(run / "METADATA.JSON")),
    "a full disk": (CHECKPOINT, cut(CHECKPOINT)),
    "a full disk at a log": (LOG, cut(LOG)),
    "a full disk at the head": ("manifest.json", cut("manifest.json")),
    "a full disk at the journal": ("journal.tsv", cut("journal.tsv")),
    "files of no bytes": ("metadata.json", cut("metadata.json", 0)),
    "zeros after a crash": (CHECKPOINT, edited(CHECKPOINT, lambda data: data[:-64] + bytes(64))),
    "a transfer that broke off": ("manifest.json", broken_off),
    "no manifest": ("manifest.json", without("manifest.json")),
    "no journal": ("journal.tsv", without("journal.tsv")),
    "no salt": ("data/salt.bin", without("data/salt.bin")),
    "no chips": ("chips/lab-chip-0000", without("chips")),
    "no states": (CHECKPOINT, without("checkpoints")),
    "two files exchanged": (CHECKPOINT, exchanged),
    "a name with .part": (LOG, lambda run: (run / LOG).rename(run / f"{LOG}.part")),
    "gzip": (LOG, edited(LOG, gzip.compress)),
    "git-lfs": (CHECKPOINT, edited(CHECKPOINT, lambda _: POINTER)),
    "a folder of its name": ("metadata.json", in_folder),
    "a link out": (CHECKPOINT, led_out(CHECKPOINT)),
    "a folder that leads out": ("chips", led_out("chips")),
    "a bit of a disk": (LOG, edited(LOG, lambda data: data[:-1] + bytes([data[-1] ^ 1]))),
}
"""Names of ways that spoil a copy, each with what it spoils first."""
