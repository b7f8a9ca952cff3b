from analysis.report.figures import Mark as Mark, detection_curve as detection_curve
from inspector import (
    Disputant as Disputant,
    Outcome as Outcome,
    Past as Past,
    Reason as Reason,
    Settings as Settings,
    Sources as Sources,
    Trust as Trust,
    Verdict as Verdict,
    inspect as inspect,
    settle as settle,
    verify as verify,
)
from inspector.inspection.transcripts import open_run as open_run
from inspector.probability.detection import (
    samples_needed as samples_needed,
    samples_needed_without_replacement as samples_needed_without_replacement,
    samples_per_year as samples_per_year,
    snapshot_probability as snapshot_probability,
    used_share as used_share,
)
from monitor import (
    LabConfig as LabConfig,
    LabProver as LabProver,
    Recorder as Recorder,
    RunConfig as RunConfig,
    RunFolder as RunFolder,
    SimulatedLab as SimulatedLab,
    Task as Task,
    initialised as initialised,
    padded as padded,
    resume as resume,
    train as train,
)
from monitor.adapters.lightning import RecordedFit as RecordedFit
from monitor.adapters.trainer import record_trainer as record_trainer
from monitor.distributed.job import Job as Job
from monitor.distributed.launcher import arguments as arguments, join as join, launch as launch
from monitor.distributed.recorder import DistributedRecorder as DistributedRecorder
