"""The list of what a host may ask of a chip is whole, and nothing on it is a copy or speaks of the future."""

from __future__ import annotations

import copy
import os
import pickle
import re
from pathlib import Path

import pytest

import firmware_sim
from firmware_sim import FirmwareChip, MailboxError, Meter, Work

README = Path(firmware_sim.__file__).parent / "README.md"


def listed():
    text = README.read_text().partition("## What a host can ask")[2].partition("\n\nA process that was forked")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return {name for row in rows[1:] for name in re.findall(r"`(\w+)`", row)}


def test_every_public_name_is_on_the_list():
    public = {name for kind in (FirmwareChip, Meter) for name in dir(kind) if not name.startswith("_")}
    assert public == listed()


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_a_chip_nor_its_meter_is_copied(world, make):
    chip = world.make()
    memory = world.attach(chip)
    for each in (chip, memory.meter):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            make(each)


def test_a_forked_child_finds_no_chip(world):
    chip = world.make()
    memory = world.attach(chip)
    size = chip.position
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        refused = 0
        try:
            for _ in range(50):
                memory.meter.charge(Work(1, 0, firmware_sim.LABORATORY.moved))
            for call in (chip.log_bytes, chip.close_epoch, chip.reveal, lambda: chip.position, lambda: chip.idle(1)):
                try:
                    call()
                except MailboxError:
                    refused += 1
        finally:
            os.write(writer, bytes([refused]))
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == bytes([5])
    os.close(reader)
    os.waitpid(child, 0)
    assert chip.position == size
