"""A folder for PYTHONPATH: `import deep_ep` finds the module here, which calls install()."""
