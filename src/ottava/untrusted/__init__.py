"""Reading what a stranger may have written: files, pickles as data, cuts of tensors. docs/security.md says what is covered."""
