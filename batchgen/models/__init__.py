"""The model a job names, as files, and its tokenizer: without an engine, and mostly without importing one."""
