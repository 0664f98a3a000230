"""Meters of a run: its speed, and the data that it read."""

from nalanda.data.loader import PackedBatches
from nalanda.data.records import Left, describe_left
from nalanda.train.log import RunLog


class TrainingSpeed:
    """Speed of training since the last line of metrics; validation and saving do not count.

    Attributes:
        last_step: seconds of the last step.
    """

    def __init__(self, tokens: int):
        self.last_step = 0.0
        self.restart(tokens)

    def restart(self, tokens: int) -> None:
        """Begins at `tokens` of the run."""
        self.tokens, self.seconds = tokens, 0.0

    def add(self, seconds: float) -> None:
        """Adds the time of a step."""
        self.last_step = seconds
        self.seconds += seconds

    def rate(self, tokens: int) -> float:
        """Tokens per second, up to `tokens` of the run."""
        return (tokens - self.tokens) / self.seconds


class ReadingLog:
    """Logs the documents that were left out, and the sources that begin again, since it last did."""

    def __init__(self, batches: PackedBatches):
        self.batches = batches
        self.skipped, self.epochs = batches.skipped(), batches.epochs_read()

    def report_left_out(self, log: RunLog, step: int) -> None:
        """Logs how many documents were left out."""
        before, self.skipped = self.skipped, self.batches.skipped()
        reason = describe_left(self.skipped - before)
        if not reason:
            return
        only_oversized = self.skipped.keys() == {Left.OVERSIZED.value}
        kind = "oversized" if only_oversized else "left out"
        log.event(step, kind, reason=reason, documents=self.skipped.total())

    def report_epochs(self, log: RunLog, step: int) -> None:
        """Logs the sources that were read to their end, at each doubling of their whole epochs."""
        before, self.epochs = self.epochs, self.batches.epochs_read()
        for name, epochs in self.epochs.items():
            count = int(epochs)
            # The bit length grows at each doubling.
            if count.bit_length() > int(before[name]).bit_length():
                times = "once" if count == 1 else f"{count} times"
                reason = f"{name or 'the corpus'} was read {times} and begins again"
                log.event(step, "epoch", reason=reason, source=name, epochs=count)
