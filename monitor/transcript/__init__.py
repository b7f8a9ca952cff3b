"""The transcript {M, D, W} of a run, its rounding logs and its signed manifest."""

from monitor.transcript.batches import Batches, RecordedBatches
from monitor.transcript.data import RunData, encode_arrays, to_batch
from monitor.transcript.leaf import EVALUATION, STEP, WRITE, Execution, Leaf
from monitor.transcript.manifest import Entry, Manifest
from monitor.transcript.metadata import Metadata, parse_time
from monitor.transcript.reader import RunFolder, encode_state
from monitor.transcript.state import state_pieces
from monitor.transcript.write_ahead import Ahead, Staged
from monitor.transcript.writer import TranscriptWriter

__all__ = [
    "EVALUATION",
    "STEP",
    "WRITE",
    "Ahead",
    "Batches",
    "Entry",
    "Execution",
    "Leaf",
    "Manifest",
    "Metadata",
    "RecordedBatches",
    "RunData",
    "RunFolder",
    "Staged",
    "TranscriptWriter",
    "encode_arrays",
    "encode_state",
    "parse_time",
    "state_pieces",
    "to_batch",
]
