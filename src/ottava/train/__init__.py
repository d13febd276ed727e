"""A training run: configuration, data, schedule, metrics, report. One noun a file."""
