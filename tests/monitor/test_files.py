"""Files are whole or not there, whoever writes them."""

from __future__ import annotations

import threading
from pathlib import Path

from monitor.files import write_whole


def test_threads_that_write_one_file_leave_it_whole(tmp_path: Path, switching: None) -> None:
    """Each has a draft that no other thread takes away or completes."""
    path, failures = tmp_path / "file", []
    contents = [bytes([number]) * 100_000 for number in range(4)]

    def write(content: bytes) -> None:
        try:
            for _ in range(60):
                write_whole(path, content)
                assert path.read_bytes() in contents
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
