"""The `shmacc-inspect` command: see, watch, check and clean up segments in shared memory.

`start` prepares the process, `main` finds the verb, `arguments` says what each verb takes, and
`verbs` has one module for each. A verb calls `shmacc.inspection`, and shows its records as a
`page`, or as JSON in an answer of `output`. A verb's module is imported when it runs, and the
library with it: help must come at once. (Comments beside such imports say "late".)
"""

NAMESPACE_VARIABLE = "SHMACC_NAMESPACE"
PROGRAM = "shmacc-inspect"
