"""The command's entry: sets up signals, streams and threads before anything slow is imported."""

# Do not import `signal` or `typing`: each takes longer to import than everything else before the
# handler of Ctrl-C is set.
import _signal  # type: ignore[import-not-found]
import os
import sys

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_FAILED = 1


def _end_at_once(_number: int, _frame: object) -> None:
    os._exit(_INTERRUPTED)


# If SIGINT is ignored, as in a script's background jobs, Python sets no handler.
_HEEDS_CTRL_C = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if _HEEDS_CTRL_C:
    # Outside of `interrupts.raised` there is nothing to clean up, and a traceback from an import
    # helps nobody.
    _signal.signal(_signal.SIGINT, _end_at_once)

# When NumPy is imported, its linear algebra, which nothing here uses, would start a thread for each
# core: that would be a third of the time that `check` takes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main() -> int:
    """Run the command line of this process; return its exit status."""
    # Like other tools, `shmacc-inspect list | head` must be ended by SIGPIPE.
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
    _fill_closed_streams()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # not every encoding has the bars' characters
    from shmacc_inspect import main as command

    try:
        status = command.main(sys.argv[1:])
    except KeyboardInterrupt:
        status = _INTERRUPTED
    return _flushed(status)


def _fill_closed_streams() -> None:
    """Open /dev/null for each of the descriptors 0 to 2 that is closed (`list >&-`).

    Otherwise the next opened file, perhaps a segment, would get such a number, and Python's streams
    would be None. A closed stdout is opened for reading only, since writing to it must fail.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _flushed(status: int) -> int:
    """Flush stdout; return `status`, or the status of a failure if stdout cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if status == 0:
            print(f"shmacc-inspect: stdout: {error.strerror}", file=sys.stderr)
            status = _FAILED
        # Python flushes stdout again when it ends; that flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
