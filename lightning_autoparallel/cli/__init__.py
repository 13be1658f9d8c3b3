"""The command line: `lightning-autoparallel fit --config recipes/llama3/debug.yaml`."""
