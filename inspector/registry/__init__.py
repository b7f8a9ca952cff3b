"""The chip-owner directory: who answers for which chip, from fab to destruction (Shavit 2023, §6)."""

from inspector.registry._values import ChipRecord, ChipRef, ChipState, ClaimKind, Role
from inspector.registry.audit import AuditReport, audit
from inspector.registry.census import (
    Census,
    CensusOutcome,
    draw_census,
    draw_without_replacement,
    record_census,
)
from inspector.registry.census_statements import CensusDraw, CensusResult, MissingChip
from inspector.registry.directory import Receipt, Registry, positions_in, system_clock
from inspector.registry.errors import (
    ForgedStatement,
    ImportRejected,
    InvalidStatement,
    RegistryMisuse,
    RegistryUnavailable,
    StatementOutOfOrder,
    StatementRefused,
    StatementReplayed,
    UnknownChip,
    UnknownParty,
)
from inspector.registry.exposure import SECONDS_PER_YEAR, loss_records
from inspector.registry.genesis_csv import read_chips
from inspector.registry.keyfiles import load_private, load_public, write_keys
from inspector.registry.leakage import (
    census_needed,
    log_unseen_probability,
    months_until_seen,
    unseen_probability,
)
from inspector.registry.listing import Listing
from inspector.registry.losses import LossModel, LossRecord, LossReport, OwnerLosses, assess_losses
from inspector.registry.positions import check_in_hand
from inspector.registry.proof import ChipProof, log_consistency, prove_chip, verify_chip, verify_extension
from inspector.registry.publications import Publication, ReferenceValues, Revocation
from inspector.registry.publisher import PublishedView, list_now, publish, read_view, revoke
from inspector.registry.signing import SignedStatement, countersign, decode_payload, sign
from inspector.registry.statements import Claim, Enrolment, Genesis, Transfer
from inspector.registry.views import ChipView, Summary, show_chip, summarise

__all__ = [
    "SECONDS_PER_YEAR",
    "AuditReport",
    "Census",
    "CensusDraw",
    "CensusOutcome",
    "CensusResult",
    "ChipProof",
    "ChipRecord",
    "ChipRef",
    "ChipState",
    "ChipView",
    "Claim",
    "ClaimKind",
    "Enrolment",
    "ForgedStatement",
    "Genesis",
    "ImportRejected",
    "InvalidStatement",
    "Listing",
    "LossModel",
    "LossRecord",
    "LossReport",
    "MissingChip",
    "OwnerLosses",
    "Publication",
    "PublishedView",
    "Receipt",
    "ReferenceValues",
    "Registry",
    "RegistryMisuse",
    "RegistryUnavailable",
    "Revocation",
    "Role",
    "SignedStatement",
    "StatementOutOfOrder",
    "StatementRefused",
    "StatementReplayed",
    "Summary",
    "Transfer",
    "UnknownChip",
    "UnknownParty",
    "assess_losses",
    "audit",
    "census_needed",
    "check_in_hand",
    "countersign",
    "decode_payload",
    "draw_census",
    "draw_without_replacement",
    "list_now",
    "load_private",
    "load_public",
    "log_consistency",
    "log_unseen_probability",
    "loss_records",
    "months_until_seen",
    "positions_in",
    "prove_chip",
    "publish",
    "read_chips",
    "read_view",
    "record_census",
    "revoke",
    "show_chip",
    "sign",
    "summarise",
    "system_clock",
    "unseen_probability",
    "verify_chip",
    "verify_extension",
    "write_keys",
]
