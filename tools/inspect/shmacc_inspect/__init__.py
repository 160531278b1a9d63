"""The `shmacc-inspect` command: see, watch, check and clean up segments in shared memory.

`start` prepares the process, `main` finds the verb, and `verbs` has one module for each. A verb
calls `shmacc.inspection`, converts the results to the types of `output` (which are the JSON
schema), and shows them as a `page` or as JSON. A verb's module is imported only once it was asked
for, and the library only once it runs: a command has to answer before one wonders whether it hangs.
"""

NAMESPACE_VARIABLE = "SHMACC_NAMESPACE"
PROGRAM = "shmacc-inspect"
