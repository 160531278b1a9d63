"""One module for each verb: `run` is the command, `EPILOG` its examples."""
