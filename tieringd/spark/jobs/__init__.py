"""
Jobs on an archive. Each is a function of a session, a configuration and the job's options, to a `Report`.

The command `tieringd spark NAME` starts a job; see `tieringd.cli.spark`.
"""
