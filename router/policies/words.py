"""How figures stand in the words of a decision."""

WHOLE_FROM_S = 0.01  # shorter times are told with one decimal


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.{0 if seconds >= WHOLE_FROM_S else 1}f} ms"


def share(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"
