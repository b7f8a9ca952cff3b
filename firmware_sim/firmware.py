"""The honest firmware: an implementation of `Chip` over a chip folder."""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import NoReturn, Self

from firmware_sim._commands import (
    Gate,
    check_coordinate,
    check_digest,
    check_request,
    check_sealed,
    check_ticks,
    command,
)
from firmware_sim._silicon import Fuses, Silicon, State, create_silicon
from firmware_sim.beacon import beacon_digest, open_beacon
from firmware_sim.chip import EMPTY_MEMORY, Chip, SnapshotEvent, Utilisation
from firmware_sim.errors import CallerError, ChipwitnessError, EvidenceError
from firmware_sim.evidence.blocks import prepare
from firmware_sim.evidence.chiplog import (
    LATE,
    NO_RUN,
    ZERO_DIGEST,
    LogRecord,
    RecordKind,
    Registers,
    check_chain,
    genesis_digest,
    parse_log,
)
from firmware_sim.evidence.digest import BLAKE3, DEFAULT_ALGORITHM, Digest, digest_bytes, length_prefixed
from firmware_sim.evidence.envelope import SigningKey, VerifyingKey
from firmware_sim.evidence.pruning import open_log_checkpoint
from firmware_sim.evidence.quote import Quote
from firmware_sim.evidence.work import NO_WORK, TICK, Roofline, Work
from firmware_sim.identity import CURRENT_FIRMWARE, ChipType, Firmware, IdentityError, MakerCA, check_image, issue_alias
from firmware_sim.mailbox import ChipFailure, ErrorCode, MailboxError
from firmware_sim.memory import DeviceMemory, MemoryCopy
from firmware_sim.meter import NEVER
from firmware_sim.nvram import Disk, NvramError, PosixDisk
from firmware_sim.profiles import BENCH, FOLDED, LABORATORY, NvramProfile, NvramStatus
from firmware_sim.schedule import (
    EpochKey,
    commit_epoch,
    derive_epoch_key,
    is_scheduled,
    moment_of,
    threshold,
)

__all__ = ["ChipOrder", "FirmwareChip", "quote_request_digest"]

_HASHED_AT_ONCE = 1 << 20
"""Bytes of memory: a thread costs more than hashing as much."""
_MOST_SHARDS = 4
"""Of them a host that asks after each step misses few."""
_AHEAD = 256
"""Ticks in which a chip looks for its next snapshot, so that it does not look at each of them anew."""
_PATIENCE = 0.01
"""Seconds after which a thread that waits for the gate looks whether it still must."""
_UNTIMED = frozenset({RecordKind.SNAPSHOT, RecordKind.EPOCH, RecordKind.QUOTE})
"""Kinds of records for which the chip does not read its meter anew: a challenge has one time for all that it writes."""
_NO_GAP = frozenset({RecordKind.GENESIS, RecordKind.POWER_OFF, RecordKind.POWER_GAP, RecordKind.SPENT})
_BOOT_NEEDS = {RecordKind.BOOT: 1, RecordKind.EPOCH: 1, RecordKind.CLOSE_EPOCH: 1, RecordKind.SNAPSHOT: 1}
_SHA256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223"
_RFC8032_PRIVATE = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
_RFC8032_SIGNATURE = "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipOrder:
    """A maker's order of a chip; all of the chip's secrets follow from `seed` and `chip_id`.

    `snapshot_rate` is in snapshots per tick, in [0, 1]; `roofline` is what the device does in a tick
    at most; `beacon_key` is the verifier's, for beacons and log checkpoints; `nvram` says how large the chip's memory
    is, and `quotas` overrides how many records of a kind it takes. Only a dishonest chip that clones another one reads
    `clone_of`.
    """

    maker: MakerCA
    chip_id: str
    seed: bytes
    snapshot_rate: Fraction
    roofline: Roofline = LABORATORY
    firmware: Firmware = CURRENT_FIRMWARE
    algorithm: str = DEFAULT_ALGORITHM
    beacon_key: VerifyingKey | None = None
    nvram: NvramProfile = BENCH
    quotas: Mapping[RecordKind, int] = field(default_factory=dict)
    clone_of: str | None = None

    def __post_init__(self) -> None:
        threshold(self.snapshot_rate)
        if self.algorithm not in (DEFAULT_ALGORITHM, BLAKE3):
            raise CallerError(f"unknown snapshot digest {self.algorithm!r}; there are {DEFAULT_ALGORITHM}, {BLAKE3}")


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """Snapshots of one moment whose copy is being hashed; the host holds no part of it."""

    events: Sequence[SnapshotEvent]
    op: int
    work: Work
    frozen: MemoryCopy | None
    hashing: Future[Digest] = field(default_factory=Future)


class _Waiting:
    """The next moment at which the chip has to do something by its clock. The host does not learn of it.

    The meter that calls it may outlive the chip.
    """

    def __init__(self, chip: FirmwareChip) -> None:
        self._chip = weakref.ref(chip)

    def __call__(self, before: Work, after: Work) -> None:
        """It has come with an operator, before and after which the meter had counted so much."""
        chip = self._chip()
        if chip is not None:
            chip._wake(self, before, after)


class FirmwareChip(Chip):
    """The honest firmware over a chip folder; `manufacture` or `power_on` makes one.

    A chip whose log has no room left for another boot, epoch or quote is spent: it closes its epoch, says so in its
    last record, and from then on answers inspections and refuses all else.
    """

    def __init__(self, silicon: Silicon, firmware: Firmware) -> None:
        self._silicon = silicon
        self._fuses: Fuses = silicon.fuses
        self._firmware = firmware
        self._gate = Gate(silicon.fuses.secrets.chip_id)
        self._finalizer = weakref.finalize(self, silicon.close)
        self._memory: DeviceMemory | None = None
        self._copy: MemoryCopy | None = None
        self._hasher: ThreadPoolExecutor | None = None
        self._under_way: _UnderWay | None = None
        self._shards: deque[tuple[int, bytes]] | None = None
        self._waiting: _Waiting | None = None
        self._attached_at = self._counted = self._earlier = NO_WORK
        self._committed_at = self._due = 0
        self._coordinate = (NO_RUN, 0)
        self._limit = threshold(self._fuses.snapshot_rate)
        self._counts: Counter[RecordKind] = Counter()
        self._registers = Registers()
        self._boot = self._epoch = self._beacon_time = 0
        self._snapshots = self._bytes_hashed = 0
        self._epoch_key = self._booted = b""
        self._spent = False

    @classmethod
    def manufacture(
        cls,
        folder: Path | str,
        *,
        maker: MakerCA,
        chip_id: str,
        seed: bytes,
        snapshot_rate: Fraction,
        roofline: Roofline = LABORATORY,
        firmware: Firmware = CURRENT_FIRMWARE,
        algorithm: str = DEFAULT_ALGORITHM,
        beacon_key: VerifyingKey | None = None,
        nvram: NvramProfile = BENCH,
        quotas: Mapping[RecordKind, int] | None = None,
        disk: Disk | None = None,
    ) -> Self:
        """Make a chip in `folder` (which must not exist) and boot it; the keywords are those of `ChipOrder`.

        `disk` is where the system calls go, for fault tests.
        """
        order = ChipOrder(
            maker=maker,
            chip_id=chip_id,
            seed=seed,
            snapshot_rate=snapshot_rate,
            roofline=roofline,
            firmware=firmware,
            algorithm=algorithm,
            beacon_key=beacon_key,
            nvram=nvram,
            quotas=quotas or {},
        )
        return cls.from_order(folder, order, disk=disk)

    @classmethod
    def from_order(cls, folder: Path | str, order: ChipOrder, *, disk: Disk | None = None) -> Self:
        """Make a chip in `folder` and boot it."""
        cls.burn(Path(folder), order, disk or PosixDisk())
        return cls.power_on(folder, disk=disk)

    @classmethod
    def burn(cls, folder: Path, order: ChipOrder, disk: Disk) -> None:
        """Make a chip in `folder`, which must not exist, and leave it off."""
        fuses = Fuses(
            secrets=order.maker.issue_device(
                order.chip_id, order.seed, ChipType(Fraction(order.snapshot_rate), order.roofline)
            ),
            snapshot_rate=order.snapshot_rate,
            roofline=order.roofline,
            algorithm=order.algorithm,
            beacon_key=order.beacon_key,
            nvram=order.nvram.with_quotas(order.quotas),
        )
        create_silicon(folder, fuses, order.maker.sign_firmware(order.firmware), disk)

    @classmethod
    def power_on(cls, folder: Path | str, *, firmware: Firmware | None = None, disk: Disk | None = None) -> Self:
        """Boot the chip in `folder`: self-test, log check, measured boot; `firmware` installs another image first.

        Raises:
            MailboxError: the chip runs already; or the image is not signed by its maker or older than one it has
                booted; or the chip is spent and the image is not the one it last booted.
            NvramError: the folder's content was altered or is missing.
            ChipFailure: the self-test failed or the storage can't be written.
        """
        _self_test()
        silicon = Silicon(Path(folder), disk or PosixDisk())
        try:
            image = silicon.firmware if firmware is None else firmware
            cls._check_signature(silicon, image)
            cls._check_rollback(silicon, image)
            chip = cls(silicon, image)
            chip._start()
        except BaseException:
            silicon.close()
            raise
        return chip

    @property
    def chip_id(self) -> str:
        return self._fused_id

    @property
    def _fused_id(self) -> str:
        return self._fuses.secrets.chip_id

    @property
    def algorithm(self) -> str:
        return self._fuses.algorithm

    @property
    def certificate_digest(self) -> Digest:
        return self._fuses.secrets.certificate_digest

    @property
    def boot(self) -> int:
        return self._boot

    @property
    def time(self) -> int:
        """The current tick of this boot."""
        return self._time // TICK

    @property
    def _position(self) -> tuple[int, int]:
        return self._boot, self._silicon.state.log_size

    @property
    @command
    def position(self) -> tuple[int, int]:
        return self._position

    @property
    def firmware(self) -> Firmware:
        """The image that runs, with its maker's signature."""
        return self._firmware

    @property
    @command
    def utilisation(self) -> Utilisation:
        state = self._silicon.state
        return Utilisation(
            busy_ticks=self._fuses.roofline.time(self._work) // TICK,
            idle_ticks=state.tick - state.busy,
            snapshots=self._snapshots,
            bytes_hashed=self._bytes_hashed,
        )

    @property
    @command
    def nvram(self) -> NvramStatus:
        """How much of its memory the chip uses and how worn it is."""
        return self._nvram_status()

    def _nvram_status(self) -> NvramStatus:
        return self._fuses.nvram.status(
            self._counts, released=self._silicon.state.released, changes=self._silicon.nvram.sequence
        )

    @command
    def attach(self, memory: DeviceMemory, run_id: bytes, step: int) -> LogRecord:
        check_coordinate(self._fused_id, run_id, step)
        memory = self._own_memory(memory)
        buffers = MemoryCopy.blank(memory.slices())  # no snapshot waits for them
        _, whole = memory.share
        table = memory.table_digest().value
        record = self._append(RecordKind.REGIONS, run_id=run_id, step=step, op=whole, digest=table)
        self._memory, self._copy = memory, buffers
        self._earlier, self._attached_at = record.work, memory.meter.total
        self._counted, self._waiting = self._attached_at, _Waiting(self)
        self._committed_at = self._operators
        if self._hasher is None and memory.byte_count >= _HASHED_AT_ONCE:
            self._hasher = ThreadPoolExecutor(1)
            self._hasher.submit(bytes)  # starts its thread, which no tick then waits for
            prepare()
        self._coordinate = (run_id, step)
        self._await_next()
        return record

    @command
    def commit(self, run_id: bytes, step: int, digest: bytes) -> LogRecord:
        check_coordinate(self._fused_id, run_id, step)
        check_digest(self._fused_id, digest)
        record = self._append(RecordKind.COMMIT, run_id=run_id, step=step, op=self._held, digest=digest)
        self._committed_at = self._operators
        self._coordinate = (run_id, step)
        return record

    @command
    def idle(self, ticks: int) -> list[SnapshotEvent]:
        check_ticks(self._fused_id, ticks)
        self._require_service()
        self._catch_up()
        start, passed, events = self._time, 0, list[SnapshotEvent]()
        moments = self._moments(start, start + ticks * TICK)
        for until, group in groupby(moments, lambda moment: -((start - moment) // TICK)):
            due = [moment // TICK for moment in group]
            self._room_for(due)
            self._settle()
            timed = self._timed(self._silicon.state, idle=until - passed)
            self._store(dataclasses.replace(timed, pending=due[0] + 1))
            passed = until
            events += self._snapshot(due)
            if self._spent:
                return events
        self._store(self._timed(self._silicon.state, idle=ticks - passed))
        self._await_next()
        return events

    @command
    def shards(self) -> list[tuple[int, bytes]]:
        found = list(self._shards or ())
        self._shards = deque(maxlen=_MOST_SHARDS)
        return found

    @command
    def beacon(self, signed: bytes) -> LogRecord:
        check_sealed(self._fused_id, signed)
        if self._fuses.beacon_key is None:
            self._refuse(ErrorCode.NO_BEACON_KEY, "no verifier's beacon key is fused in")
        try:
            beacon = open_beacon(signed, self._fuses.beacon_key)
        except EvidenceError as error:
            self._refuse(ErrorCode.BAD_BEACON, str(error))
        if beacon.chip_id != self._fused_id or (beacon.boot, beacon.size) != self._position:
            boot, size = self._position
            self._refuse(
                ErrorCode.BAD_BEACON,
                f"beacon is for chip {beacon.chip_id!r:.100} at boot {beacon.boot} with {beacon.size} records, and "
                f"this one is at boot {boot} with {size}",
            )
        if beacon.time <= self._beacon_time:
            self._refuse(
                ErrorCode.BAD_BEACON, f"beacon of {beacon.time} is not later than the last of {self._beacon_time}"
            )
        record = self._append(RecordKind.BEACON, step=beacon.time, digest=beacon_digest(signed).value)
        self._beacon_time = beacon.time
        return record

    @command
    def prune(self, signed: bytes) -> int:
        """Release all records before a log checkpoint that the verifier signed; a spent chip boots again.

        Returns the bytes of NVRAM that are free.
        """
        check_sealed(self._fused_id, signed)
        self._require_power()
        if self._fuses.beacon_key is None:
            self._refuse(ErrorCode.NO_BEACON_KEY, "no verifier's key is fused in")
        try:
            checkpoint = open_log_checkpoint(signed, self._fused_id, self._fuses.beacon_key)
        except EvidenceError as error:
            self._refuse(ErrorCode.BAD_CHECKPOINT, str(error))
        state, records = self._silicon.state, self._read_log()
        released = records[: max(checkpoint.size - state.checkpoint.size, 0)]
        if not released or state.checkpoint.extend(released) != checkpoint:
            self._refuse(ErrorCode.BAD_CHECKPOINT, "its log never was what the checkpoint says, or no longer holds it")
        cells = sum(record.kind not in FOLDED for record in released)
        self._silicon.prune(dataclasses.replace(state, checkpoint=checkpoint, released=state.released + cells))
        self._counts = Counter(record.kind for record in records[len(released) :])
        if checkpoint.spent:
            self._spent, self._memory, self._copy, self._coordinate = False, None, None, (NO_RUN, 0)
            self._waiting, self._counted, self._committed_at = None, NO_WORK, 0
            self._start()
        return self._fuses.nvram.capacity - self._nvram_status().used

    @command
    def close_epoch(self) -> int:
        self._require_power()
        return self._close_epoch()

    def _close_epoch(self) -> int:
        closed = self._epoch
        if self._spent:
            return closed
        if self._has_room({RecordKind.EPOCH: 1, RecordKind.CLOSE_EPOCH: 2}):
            self._end_epoch()
            self._open_epoch(closed + 1)
        else:
            self._retire()
        return closed

    @command
    def reveal(self) -> tuple[EpochKey, ...]:
        since = self._silicon.state.checkpoint
        first = since.epochs - (since.epoch_record is not None)  # the epoch that was open then has ended since
        return tuple(
            EpochKey(epoch=epoch, key=derive_epoch_key(self._fuses.schedule_secret, epoch))
            for epoch in range(first, self._epoch + self._spent)
        )

    @command
    def quote(self, nonce: bytes, verifier_id: str) -> bytes:
        check_request(self._fused_id, nonce, verifier_id)
        self._require_power()
        self._catch_up()
        return self._quote(nonce, verifier_id)

    @command
    def challenge(self, nonce: bytes, verifier_id: str) -> bytes:
        check_request(self._fused_id, nonce, verifier_id)
        self._require_power()
        self._close_epoch()
        return self._quote(nonce, verifier_id)

    def _quote(self, nonce: bytes, verifier_id: str) -> bytes:
        if not self._spent and not self._has_room({RecordKind.QUOTE: 1}):
            self._retire()
        held = 0 if self._spent else self._held
        if self._spent:
            self._store(self._silicon.state)  # the counter grows with each quote
        else:
            self._append(RecordKind.QUOTE, op=held, digest=quote_request_digest(nonce, verifier_id).value)
        state = self._silicon.state
        quote = Quote(
            chip_id=self._fused_id,
            certificate_digest=self.certificate_digest,
            measurement=self._firmware.measurement,
            security_version=self._firmware.security_version,
            boot=self._boot,
            tick=state.tick,
            epoch=self._epoch,
            counter=self._silicon.nvram.sequence,
            log_size=self._silicon.state.log_size,
            log_head=self._silicon.state.log_head,
            journey=self._registers.journey,
            current=self._registers.current,
            snapshot_rate=self._fuses.snapshot_rate,
            flop_rate=self._fuses.roofline.flop,
            moved_rate=self._fuses.roofline.moved,
            snapshot_algorithm=self._fuses.algorithm,
            beacon=self._beacon_time,
            calls=state.work.calls,
            flop=state.work.flop,
            moved=state.work.moved,
            held=held,
            nonce=nonce,
            verifier_id=verifier_id,
        )
        return quote.sign(self._alias_key())

    @command
    def log_bytes(self) -> bytes:
        self._require_power()
        return self._silicon.log.read()

    @command
    def certificate_chain(self) -> bytes:
        return issue_alias(self._fuses.secrets, self._firmware)

    @command
    def power_off(self) -> None:
        self._require_power()
        if not self._spent:
            self._require_space(RecordKind.POWER_OFF)
            self._end_epoch()
            self._append(RecordKind.POWER_OFF)
        self._lose_power()

    @command
    def cut_power(self) -> None:
        self._brown_out()

    def _brown_out(self) -> None:
        """Lose power; the supply's reserve lasts for one more write, which keeps what the meter has counted.

        Snapshots that this demands, and that were not taken, are under way then.
        """
        if self._finalizer.alive:
            with suppress(ChipwitnessError, OSError):
                self._silicon.recall()
                due, state = self._look(), self._silicon.state
                if self._work != state.work:
                    pending = state.pending or (due[0] // TICK + 1 if due else 0)
                    self._silicon.store(dataclasses.replace(self._timed(state), pending=pending))
        self._lose_power()

    @property
    def _changes(self) -> int:
        """The monotonic counter: how often the persistent state has changed."""
        return self._silicon.nvram.sequence

    @property
    def _work(self) -> Work:
        """What the meter had counted in this boot when the chip looked last."""
        return self._earlier if self._memory is None else self._shared(self._counted)

    def _shared(self, total: Work) -> Work:
        """The chip's work in this boot by what the meter of its memory counts."""
        share = (1, 1) if self._memory is None else self._memory.share
        return self._earlier + (total - self._attached_at).share(*share)

    @property
    def _operators(self) -> int:
        """How many operators had run on all of the memory of which the chip's is a part, when it looked last."""
        return self._counted.calls

    @property
    def _held(self) -> int:
        """The chip's part of the results of operators that are held outside its regions, in bytes."""
        if self._memory is None:
            return 0
        part, whole = self._memory.share
        return self._memory.meter.holdings.byte_count * part // whole

    @property
    def _time(self) -> int:
        """The time of this boot, in 2^-32 ticks."""
        return self._time_of(self._work)

    def _time_of(self, work: Work) -> int:
        """The time when the meter has counted so much, with the idle ticks up to now."""
        state = self._silicon.state
        return self._fuses.roofline.time(work) + (state.tick - state.busy) * TICK

    def _timed(self, state: State, *, idle: int = 0) -> State:
        """The state with the time that it is now, and so many idle ticks later."""
        work = self._work
        busy = self._fuses.roofline.time(work) // TICK
        return dataclasses.replace(state, work=work, busy=busy, tick=state.tick - state.busy + busy + idle)

    def _settle(self) -> None:
        """Record the snapshots that are under way, once they are hashed."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        digest = under_way.hashing.result()
        for number, event in enumerate(under_way.events, start=1):
            self._append(
                RecordKind.SNAPSHOT, run_id=event.run_id, step=event.step, op=under_way.op, digest=digest.value,
                tick=event.tick, work=under_way.work,
                pending=under_way.events[number].tick + 1 if number < len(under_way.events) else 0,
            )  # fmt: skip
            self._snapshots += 1
            self._bytes_hashed += event.bytes_hashed
            if self._shards is not None and under_way.frozen is not None:
                self._shards.append((event.record, under_way.frozen.to_bytes()))

    def _lose_power(self) -> None:
        """End at once, in the middle of a command; a snapshot under way shows as a power gap that names its tick."""
        self._under_way = self._waiting = None
        if self._hasher is not None:
            self._hasher.shutdown(wait=False)
        self._finalizer()

    def _is_due(self, tick: int) -> bool:
        return is_scheduled(self._epoch_key, self._boot, tick, self._limit)

    def _moments(self, start: int, end: int) -> Iterator[int]:
        """The moments in (start, end] at which the open epoch demands a snapshot."""
        for tick in range(start // TICK, end // TICK + 1):
            if self._is_due(tick) and start < (moment := moment_of(self._epoch_key, self._boot, tick)) <= end:
                yield moment

    def _await_next(self) -> None:
        """Have the meter call when the next snapshot is due or the next tick begins, whichever comes first.

        A tick that has begun is in NVRAM before its work goes on, so that no power cut hides it.
        """
        if self._memory is None or self._waiting is None or not self._epoch_key:
            return
        now = self._time
        if not now < self._due:
            ahead = now + _AHEAD * TICK
            self._due = next(self._moments(now, ahead), ahead)
        edge = (now // TICK + 1) * TICK
        self._memory.meter.wake(self._reached(min(edge, self._due)), self._waiting)

    def _reached(self, time: int) -> Work:
        """What the meter of all the memory has counted as soon as the chip's time is so late, in FLOP or in bytes."""
        assert self._memory is not None
        state, (part, whole) = self._silicon.state, self._memory.share
        flop, moved = self._fuses.roofline.least(time - (state.tick - state.busy) * TICK)
        begun = self._attached_at
        return Work(
            NEVER,
            begun.flop - (self._earlier.flop - flop) * whole // part,
            begun.moved - (self._earlier.moved - moved) * whole // part,
        )

    def _wake(self, waiting: _Waiting, before: Work, after: Work) -> None:
        """Take the snapshot whose moment has come; called between two operators, and not by the host.

        Where these run inside of a command of the chip, in a handler of a signal for instance, it can neither take one
        nor go on without: its power fails.
        """
        if self._waiting is not waiting:
            return  # the chip holds another memory
        try:
            self._gate.check_process()
        except MailboxError:
            return  # a copy of this process, and no chip
        try:
            self._gate.enter()
        except MailboxError:
            self._brown_out()
            return
        try:
            if self._waiting is waiting and self._memory is not None:
                self._pass_time((before, after))
                if self._silicon.state.tick < self.time:
                    self._store(self._timed(self._silicon.state))
                self._await_next()
        except (ChipwitnessError, OSError):
            self._lose_power()  # as the next command will find out
        except BaseException:
            self._brown_out()
            raise
        finally:
            self._gate.leave()

    def _look(self) -> list[int]:
        """Read the meter, once for all that follows; the moments that have come since what NVRAM holds.

        While no epoch is open it is not read: no time passes.
        """
        if self._memory is None or not self._epoch_key:
            return []
        before = self._time_of(self._silicon.state.work)
        self._counted = self._memory.meter.total
        self._work.to_bytes()  # no record holds more: it is not even looked at
        return list(self._moments(before, self._time))

    def _pass_time(self, operator: tuple[Work, Work] | None = None) -> None:
        """Take the snapshots whose moments have come, in time only if that was with the last operator.

        Args:
            operator: what the meter had counted before and after the one that woke the chip, if one did.
        """
        due = self._look()
        if due:
            before, after = operator or (self._counted, self._counted)
            is_late = after != self._counted or due[0] <= self._time_of(self._shared(before))
            self._snapshot([moment // TICK for moment in due], LATE if is_late else 0)

    def _catch_up(self) -> None:
        """Take what the meter wakes the chip for in another thread, which waits for this command."""
        self._pass_time()
        self._settle()

    def _snapshot(self, ticks: Sequence[int], mark: int = 0) -> list[SnapshotEvent]:
        """Copy the memory for the snapshots of some ticks; hash a large copy during the training, others at once.

        A chip whose log is full with them is spent from this moment on.
        """
        if not ticks:
            return []
        self._settle()
        left = self._room_for(ticks)
        in_background = self._hasher is not None and left > 0
        if self._memory is not None:  # whatever becomes of the host while its memory is read, this one was due
            self._store(dataclasses.replace(self._timed(self._silicon.state), pending=ticks[0] + 1))
        frozen = self._freeze()
        first, (run_id, step) = self._silicon.state.log_size, self._coordinate
        events = [
            SnapshotEvent(
                chip_id=self._fused_id,
                record=first + number,
                boot=self._boot,
                tick=tick,
                run_id=run_id,
                step=step,
                bytes_hashed=0 if frozen is None else frozen.byte_count,
            )
            for number, tick in enumerate(ticks)
        ]
        op = mark | self._operators - self._committed_at
        under_way = self._under_way = _UnderWay([_own(event) for event in events], op, self._work, frozen)
        if in_background and self._hasher is not None:
            self._hasher.submit(self._hash, frozen, under_way)
        else:
            under_way.hashing.set_result(self._digest(frozen))
            self._settle()
        if not left:
            self._retire()
        return events

    def _room_for(self, ticks: Sequence[int]) -> int:
        """How many records of snapshots have room in the log after those of some ticks; ChipFailure if these have not.

        Then the chip's power goes, and by what it has stored they were not due yet.
        """
        under_way = 0 if self._under_way is None else len(self._under_way.events)
        used = self._counts[RecordKind.SNAPSHOT] + under_way + len(ticks)
        left = self._fuses.nvram.quotas[RecordKind.SNAPSHOT] - used
        if left < 0:
            raise ChipFailure(ErrorCode.LOG_FULL, f"chip {self._fused_id}: no room for {len(ticks)} SNAPSHOT records")
        return left

    def _freeze(self) -> MemoryCopy | None:
        """An owned copy of the memory, in the buffers of the last one; None where there is none, or it is gone."""
        if self._memory is None:
            return None
        try:
            self._copy = self._memory.copy(self._copy)
        except OSError:
            return None
        return self._copy

    def _digest(self, frozen: MemoryCopy | None) -> Digest:
        if frozen is not None:
            return frozen.digest(self._fuses.algorithm)
        return EMPTY_MEMORY if self._memory is None else Digest(self._fuses.algorithm, ZERO_DIGEST)

    def _hash(self, frozen: MemoryCopy | None, under_way: _UnderWay) -> None:
        """Hash a copy while the host goes on, and record it unless a command does so first.

        A command that holds the gate may be waiting for the next hash, which this thread makes: it is not waited for.
        """
        try:
            under_way.hashing.set_result(self._digest(frozen))
        except BaseException as error:
            under_way.hashing.set_exception(error)
        while self._under_way is under_way:
            with self._gate.passed(_PATIENCE) as inside:
                if inside and self._under_way is under_way:
                    try:
                        self._settle()
                    except Exception:
                        self._lose_power()  # as the next command will find out

    def _alias_key(self) -> SigningKey:
        return self._fuses.secrets.alias_key(self._firmware)

    def _end_epoch(self) -> None:
        digest = commit_epoch(self._fused_id, self._epoch, self._epoch_key).value
        self._append(RecordKind.CLOSE_EPOCH, step=self._epoch, digest=digest)
        self._epoch_key = b""

    def _retire(self) -> None:
        self._end_epoch()
        self._append(RecordKind.SPENT)
        self._spent = True

    def _start(self) -> None:
        """Check the log against the state, then boot: genesis, power gap, BOOT, EPOCH, as far as they are due."""
        records = self._read_log()
        self._counts = Counter(record.kind for record in records)
        end = self._silicon.state.checkpoint.extend(records)
        self._registers = Registers(journey=end.journey, current=end.current)
        self._boot, self._booted, self._beacon_time = end.boot, end.measurement, end.beacon
        self._epoch = max(end.epochs - 1, 0)
        last = records[-1].kind if records else end.ended
        self._earlier = self._silicon.state.work
        if last is None:
            digest = genesis_digest(self._fused_id, self.certificate_digest, self._fuses.log_id)
            last = self._append(RecordKind.GENESIS, run_id=self._fuses.log_id, digest=digest).kind
        gap = int(last not in _NO_GAP)
        boots = last is not RecordKind.SPENT and self._has_room({**_BOOT_NEEDS, RecordKind.POWER_GAP: gap + 1})
        if not boots and self._firmware.measurement.value != self._booted:
            self._refuse(ErrorCode.CHIP_SPENT, "is spent and answers with the firmware that it last booted only")
        if gap:
            pending = self._silicon.state.pending
            self._append(RecordKind.POWER_GAP, step=self._epoch, op=pending, digest=end.opened)
        if not boots:
            if last is not RecordKind.SPENT:
                self._append(RecordKind.SPENT)
            self._spent = True
            return
        self._silicon.install(self._firmware)
        self._boot += 1
        self._earlier = NO_WORK
        floor = max(self._silicon.state.security_floor, self._firmware.security_version)
        self._append(
            RecordKind.BOOT,
            step=self._firmware.security_version,
            op=int(last in (RecordKind.GENESIS, RecordKind.POWER_OFF)),
            digest=self._firmware.measurement.value,
            security_floor=floor,
        )
        self._open_epoch(end.epochs)

    def _read_log(self) -> list[LogRecord]:
        state = self._silicon.state
        since = state.checkpoint
        if state.log_size == since.size:
            return []
        records = parse_log(self._silicon.log.read(), chip=self._fused_id)
        genesis = genesis_digest(self._fused_id, self.certificate_digest, self._fuses.log_id)
        check_chain(records, genesis, chip=self._fused_id, size=since.size, head=since.head)
        if records[-1].hash() != state.log_head:
            raise NvramError(f"chip {self._fused_id}: log does not end with the head that its state holds")
        return records

    def _open_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        key = derive_epoch_key(self._fuses.schedule_secret, epoch)
        self._append(RecordKind.EPOCH, step=epoch, digest=commit_epoch(self._fused_id, epoch, key).value)
        self._epoch_key, self._due = key, 0
        self._await_next()

    def _append(
        self,
        kind: RecordKind,
        *,
        run_id: bytes = NO_RUN,
        step: int = 0,
        op: int = 0,
        digest: bytes = ZERO_DIGEST,
        tick: int | None = None,
        work: Work | None = None,
        pending: int = 0,
        security_floor: int | None = None,
    ) -> LogRecord:
        """Record something; a snapshot is of the `tick` and `work` that are given."""
        self._require_space(kind)
        if kind not in _UNTIMED:
            self._catch_up()
            self._require_space(kind)
        state = self._silicon.state
        if kind is RecordKind.BOOT:
            state = dataclasses.replace(state, tick=0, busy=0, work=NO_WORK)
        elif work is None or not work <= state.work:
            state = self._timed(state)
        work = state.work if work is None else work
        record = LogRecord(
            counter=state.log_size, kind=kind, boot=self._boot, tick=state.tick if tick is None else tick,
            busy=self._fuses.roofline.time(work) // TICK, run_id=run_id, step=step, op=op, digest=digest,
            previous=state.log_head, work=work,
        )  # fmt: skip
        following = dataclasses.replace(
            state,
            log_size=state.log_size + 1,
            log_head=record.hash(),
            last_record=record.to_bytes(),
            pending=pending,
            security_floor=state.security_floor if security_floor is None else security_floor,
        )
        self._silicon.append(following)
        self._counts[kind] += 1
        self._registers = self._registers.extend(record)
        return record

    def _store(self, state: State) -> None:
        self._require_power()
        self._silicon.store(state)

    def _require_power(self) -> None:
        if not self._finalizer.alive:
            self._refuse(ErrorCode.POWERED_OFF, "chip is powered off")

    def _has_room(self, needed: Mapping[RecordKind, int]) -> bool:
        return all(self._counts[kind] + count <= self._fuses.nvram.quotas[kind] for kind, count in needed.items())

    def _require_service(self) -> None:
        self._require_power()
        if self._spent:
            self._refuse(ErrorCode.CHIP_SPENT, "is spent: its log is full, and it only answers inspections")

    def _require_space(self, kind: RecordKind) -> None:
        self._require_service()
        if self._counts[kind] >= self._fuses.nvram.quotas[kind]:
            self._refuse(ErrorCode.QUOTA_EXCEEDED, f"all {self._fuses.nvram.quotas[kind]} {kind.name} records are used")

    def _own_memory(self, memory: DeviceMemory) -> DeviceMemory:
        if type(memory) is not DeviceMemory:
            self._refuse(ErrorCode.BAD_ARGUMENT, "a memory is of type DeviceMemory")
        try:
            return memory.owned()
        except CallerError as error:
            self._refuse(ErrorCode.BAD_ARGUMENT, str(error))

    def _refuse(self, code: ErrorCode, message: str) -> NoReturn:
        raise MailboxError(code, f"chip {self._fused_id}: {message}")

    @classmethod
    def _check_signature(cls, silicon: Silicon, image: Firmware) -> None:
        try:
            check_image(image, silicon.fuses.secrets)
        except IdentityError as error:
            raise MailboxError(ErrorCode.FIRMWARE_UNSIGNED, str(error)) from None

    @classmethod
    def _check_rollback(cls, silicon: Silicon, image: Firmware) -> None:
        floor = silicon.state.security_floor
        if image.security_version < floor:
            raise MailboxError(
                ErrorCode.FIRMWARE_ROLLBACK,
                f"chip {silicon.fuses.secrets.chip_id}: firmware security version {image.security_version} is below "
                f"{floor}, which it has booted",
            )


def quote_request_digest(nonce: bytes, verifier_id: str) -> Digest:
    """Return what the QUOTE record of a quote for this nonce and verifier holds."""
    return digest_bytes("quote-request", length_prefixed(nonce, verifier_id))


def _own(event: SnapshotEvent) -> SnapshotEvent:
    """What the host holds can be altered by the host, frozen or not: the firmware goes by a copy."""
    return dataclasses.replace(event)


def _self_test() -> None:
    """Known answers before service: SHA-256 of "abc" (FIPS 180-4 examples) and RFC 8032, 7.1, test 1."""
    key = SigningKey.from_private_bytes(bytes.fromhex(_RFC8032_PRIVATE))
    hash_is_right = hashlib.sha256(b"abc").hexdigest().startswith(_SHA256_OF_ABC)
    if not hash_is_right or not key.sign(b"").hex().startswith(_RFC8032_SIGNATURE):
        raise ChipFailure(ErrorCode.SELF_TEST_FAILED, "self-test failed")
