"""One module for each verb, whose `run` executes the verb; `arguments` declares the arguments."""
