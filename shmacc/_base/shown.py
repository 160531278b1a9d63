"""How a message shows a value that a caller gave."""

_MOST = 250  # characters; a name that is just too long is shown whole


def shown(given: object) -> str:
    """Return the repr of a value, but ``1.5`` for ``np.float64(1.5)``. Long text is cut."""
    plain = _plain(given)
    # `item` leaves NumPy's long doubles as they are. Their repr names the class, str does not.
    text = str(plain) if hasattr(plain, "item") and _is_number(plain) else repr(plain)
    return text if len(text) <= _MOST else f"{text[:_MOST]}... ({len(text)} characters)"


def _plain(given: object) -> object:
    # np.str_ and enums of strings would show their class.
    if isinstance(given, str):
        return str.__str__(given)
    if hasattr(given, "item") and _is_number(given):
        return given.item()
    if type(given) is list:
        return [_plain(each) for each in given]
    return tuple(map(_plain, given)) if type(given) is tuple else given


def _is_number(given: object) -> bool:
    return getattr(given, "ndim", None) == 0
