"""Whether the next block of a run is to be requested."""


def next_block(run: str, first: int, last: int, stopped: bool, busy: bool) -> tuple[str, str]:
    """The key of the block to request, the same for the same cause, or nothing; and why nothing.

    Args:
        first: the first step with something left to do.
        last: the run's last step.
        stopped: a person stopped the run.
        busy: something drives it, or is about to.
    """
    if stopped:
        return "", f"run {run} was stopped; `furlong resume {run}` lets it go on"
    if first > last:
        return "", f"run {run} has taken all of its {last} steps"
    if busy:
        return "", f"run {run} is being driven, or waits in the queue"
    return f"{run}-{first:05d}", ""
