"""
The `tieringd` command: one file for each command or group of commands.

In: arguments, a configuration file. Out: text or JSON on standard output, progress and errors on standard
error, an exit code.

Read `main` first: it lists the commands, and imports the one that runs. `options`, `human`, `logging` and
`daemon_status` are what several commands share. `archive` has `move_commands` and `archive_scrub` beside it;
`read` has `partition_log`, and `topic` has `topic_snapshot` and `describe_storage`. `recover`, `spark` and
`demo` are packages. `run` starts the daemon, `gateway` the archive endpoint; `config`, `explain`, `generate`,
`logdirs` and `space` show and write what their names say.
"""
