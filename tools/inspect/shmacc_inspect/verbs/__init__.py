"""One module for each verb, which `run` carries out; `arguments` says what it takes."""
