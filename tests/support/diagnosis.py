"""What `doctor` finds."""

from grabstream.ops.diagnosis.examination import Examination
from grabstream.ops.diagnosis.findings import Finding


def findings_of(examination: Examination, check: str) -> list[Finding]:
    """The findings of one check."""
    return [finding for name, finding in examination.findings if name == check]
