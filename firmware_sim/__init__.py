"""Simulated chip firmware: evidence formats, identity, device memory, NVRAM, snapshots, dishonest chips.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firmware_sim.audit import Draws, ScheduleAudit, audit_schedule, check_epoch_keys, epoch_spans
    from firmware_sim.beacon import Beacon, BeaconIssuer, beacon_digest, open_beacon, seal_beacon
    from firmware_sim.checks import (
        CHIP_GUARDS,
        CheckedChip,
        ChipEvidence,
        ChipTrust,
        CloneError,
        LogPosition,
        RollbackError,
        SnapshotError,
        check_chip,
        check_distinct,
        check_extends,
        check_life,
        check_log_chain,
        check_log_quoted,
        check_quote_identity,
        check_quote_time,
        check_regions,
        check_registers,
        check_snapshot,
        collect_evidence,
        records_of,
    )
    from firmware_sim.chip import EMPTY_MEMORY, Chip, SnapshotEvent
    from firmware_sim.dishonest_chips import (
        CHIP_LIES,
        LEAKY_FIRMWARE,
        OLD_FIRMWARE,
        chip_class,
        make_chip,
        power_on_chip,
    )
    from firmware_sim.errors import CallerError, ChipwitnessError, DeviceError, EvidenceError
    from firmware_sim.evidence import (
        BIRTH,
        BLAKE3,
        DEFAULT_ALGORITHM,
        DTYPE_SIZES,
        NO_RUN,
        NO_WORK,
        RECORD_BYTES,
        TICK,
        ZERO_DIGEST,
        Digest,
        LogCheckpoint,
        LogError,
        LogRecord,
        Quote,
        QuoteError,
        RecordKind,
        Roofline,
        SignatureError,
        SigningKey,
        Work,
        decode_base64,
        digest_bytes,
        open_log_checkpoint,
        open_quote,
        parse_log,
        seal_log_checkpoint,
    )
    from firmware_sim.firmware import FirmwareChip
    from firmware_sim.identity import (
        CURRENT_FIRMWARE,
        ChipType,
        Firmware,
        IdentityError,
        MakerCA,
        check_firmware,
        check_image,
        check_maker,
        issue_alias,
        read_chain,
        verify_chain,
    )
    from firmware_sim.mailbox import ChipFailure, ErrorCode, MailboxError
    from firmware_sim.memory import (
        REGION_KINDS,
        DeviceMemory,
        MemoryCopy,
        Region,
        RegionEntry,
        is_simulated,
        parse_table,
        simulate_device,
    )
    from firmware_sim.meter import KEPT_BYTES, NEVER, Holdings, Meter, Operand, work_of
    from firmware_sim.nvram import SLOT_BYTES, NvramError, PosixDisk
    from firmware_sim.order import ChipOrder
    from firmware_sim.profiles import DEPLOYMENT, LABORATORY, NvramProfile, scaled_device
    from firmware_sim.schedule import (
        EpochKey,
        ScheduleError,
        Unaudited,
        decode_epoch_keys,
        derive_epoch_key,
        encode_epoch_keys,
        rate_per_tick,
        scheduled,
        threshold,
    )

__all__ = [
    "BIRTH",
    "BLAKE3",
    "CHIP_GUARDS",
    "CHIP_LIES",
    "CURRENT_FIRMWARE",
    "DEFAULT_ALGORITHM",
    "DEPLOYMENT",
    "DTYPE_SIZES",
    "EMPTY_MEMORY",
    "KEPT_BYTES",
    "LABORATORY",
    "LEAKY_FIRMWARE",
    "NEVER",
    "NO_RUN",
    "NO_WORK",
    "OLD_FIRMWARE",
    "RECORD_BYTES",
    "REGION_KINDS",
    "SLOT_BYTES",
    "TICK",
    "ZERO_DIGEST",
    "Beacon",
    "BeaconIssuer",
    "CallerError",
    "CheckedChip",
    "Chip",
    "ChipEvidence",
    "ChipFailure",
    "ChipOrder",
    "ChipTrust",
    "ChipType",
    "ChipwitnessError",
    "CloneError",
    "DeviceError",
    "DeviceMemory",
    "Digest",
    "Draws",
    "EpochKey",
    "ErrorCode",
    "EvidenceError",
    "Firmware",
    "FirmwareChip",
    "Holdings",
    "IdentityError",
    "LogCheckpoint",
    "LogError",
    "LogPosition",
    "LogRecord",
    "MailboxError",
    "MakerCA",
    "MemoryCopy",
    "Meter",
    "NvramError",
    "NvramProfile",
    "Operand",
    "PosixDisk",
    "Quote",
    "QuoteError",
    "RecordKind",
    "Region",
    "RegionEntry",
    "RollbackError",
    "Roofline",
    "ScheduleAudit",
    "ScheduleError",
    "SignatureError",
    "SigningKey",
    "SnapshotError",
    "SnapshotEvent",
    "Unaudited",
    "Work",
    "audit_schedule",
    "beacon_digest",
    "check_chip",
    "check_distinct",
    "check_epoch_keys",
    "check_extends",
    "check_firmware",
    "check_image",
    "check_life",
    "check_log_chain",
    "check_log_quoted",
    "check_maker",
    "check_quote_identity",
    "check_quote_time",
    "check_regions",
    "check_registers",
    "check_snapshot",
    "chip_class",
    "collect_evidence",
    "decode_base64",
    "decode_epoch_keys",
    "derive_epoch_key",
    "digest_bytes",
    "encode_epoch_keys",
    "epoch_spans",
    "is_simulated",
    "issue_alias",
    "make_chip",
    "open_beacon",
    "open_log_checkpoint",
    "open_quote",
    "parse_log",
    "parse_table",
    "power_on_chip",
    "rate_per_tick",
    "read_chain",
    "records_of",
    "scaled_device",
    "scheduled",
    "seal_beacon",
    "seal_log_checkpoint",
    "simulate_device",
    "threshold",
    "verify_chain",
    "work_of",
]

_HOMES = {
    "audit": "Draws ScheduleAudit audit_schedule check_epoch_keys epoch_spans",
    "beacon": "Beacon BeaconIssuer beacon_digest open_beacon seal_beacon",
    "checks": (
        "CHIP_GUARDS CheckedChip ChipEvidence ChipTrust CloneError LogPosition RollbackError SnapshotError "
        "check_chip check_distinct check_extends check_life check_log_chain check_log_quoted check_quote_identity "
        "check_quote_time check_regions check_registers check_snapshot collect_evidence records_of"
    ),
    "chip": "Chip EMPTY_MEMORY SnapshotEvent",
    "dishonest_chips": "CHIP_LIES LEAKY_FIRMWARE OLD_FIRMWARE chip_class make_chip power_on_chip",
    "errors": "CallerError ChipwitnessError DeviceError EvidenceError",
    "evidence": (
        "BIRTH BLAKE3 DEFAULT_ALGORITHM DTYPE_SIZES Digest LogCheckpoint LogError LogRecord NO_RUN NO_WORK Quote "
        "QuoteError RECORD_BYTES RecordKind Roofline SignatureError SigningKey TICK Work ZERO_DIGEST decode_base64 "
        "digest_bytes open_log_checkpoint open_quote parse_log seal_log_checkpoint"
    ),
    "firmware": "FirmwareChip",
    "order": "ChipOrder",
    "identity": (
        "CURRENT_FIRMWARE ChipType Firmware IdentityError MakerCA check_firmware check_image check_maker "
        "issue_alias read_chain verify_chain"
    ),
    "mailbox": "ChipFailure ErrorCode MailboxError",
    "memory": "DeviceMemory MemoryCopy REGION_KINDS Region RegionEntry is_simulated parse_table simulate_device",
    "meter": "Holdings KEPT_BYTES Meter NEVER Operand work_of",
    "nvram": "NvramError PosixDisk SLOT_BYTES",
    "profiles": "DEPLOYMENT LABORATORY NvramProfile scaled_device",
    "schedule": (
        "EpochKey ScheduleError Unaudited decode_epoch_keys derive_epoch_key encode_epoch_keys rate_per_tick "
        "scheduled threshold"
    ),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"firmware_sim.{home}"), name)
    raise AttributeError(f"module 'firmware_sim' has no attribute {name!r}")
