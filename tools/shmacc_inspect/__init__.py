"""The `shmacc-inspect` command: see, watch, check and clean up segments in shared memory.

`verbs` has one module for each verb. A verb calls `shmacc.inspection`, converts the results to the
types of `output` (which are the JSON schema), and shows them as a `page` or as JSON. The library,
and NumPy with it, is imported only once a verb runs, so that `--help` and completion are quick.
"""

NAMESPACE_VARIABLE = "SHMACC_NAMESPACE"
