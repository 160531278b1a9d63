"""The `shmacc-inspect` command: see, watch, check and clean up segments in shared memory.

`start` prepares the process, `main` finds the verb, `arguments` declares each verb's arguments, and
`verbs` has one module for each verb. A verb calls `shmacc.inspection`, and shows its records as a
`page`, or as JSON in an answer of `output`. A verb's module, and the library with it, is imported
only when the verb runs, since help must be printed at once. (Such imports have the comment "late".)
"""

NAMESPACE_VARIABLE = "SHMACC_NAMESPACE"
PROGRAM = "shmacc-inspect"
