"""One module for each verb: its `run` carries the verb out; `arguments` declares its arguments."""
