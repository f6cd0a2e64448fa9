"""Is the GPU sane? Asked by an init container before a model is loaded: a sick card fails in a second, not after ten minutes.

What it catches: no card or driver in the pod, a card that does not answer, one that computes wrongly, and one whose memory another
process holds.
"""

from __future__ import annotations

from millrace.errors import UnavailableError

SIZE = 512
# Of the card's memory; what a process left behind would otherwise show as an engine that cannot start.
FREE_SHARE = 0.8


def check_device() -> str:
    """One line about the cards, when each computes a product rightly. Raises UnavailableError naming the card that does not."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise UnavailableError("there is no torch in this image; check-device belongs to the GPU image.") from error
    if not torch.cuda.is_available():
        raise UnavailableError("no GPU is usable here: the pod has none, or its driver does not fit this image's CUDA.")
    names = []
    for index in range(torch.cuda.device_count()):
        name = f"GPU {index} ({torch.cuda.get_device_name(index)})"
        try:
            free, total = torch.cuda.mem_get_info(index)
            # Whole numbers, so that the product is exact whatever the order of its sums.
            ones = torch.ones((SIZE, SIZE), device=f"cuda:{index}")
            right = bool((ones @ ones == SIZE).all().item())
        except RuntimeError as error:
            raise UnavailableError(f"{name} does not answer: {str(error).splitlines()[0]}") from error
        if not right:
            raise UnavailableError(f"{name} computes wrongly; take its node out of service.")
        if free < FREE_SHARE * total:
            raise UnavailableError(
                f"{name} has {free / 2**30:.0f} of {total / 2**30:.0f} GiB free; another process holds it."
            )
        names.append(name)
    return f"{', '.join(names)} compute rightly"
