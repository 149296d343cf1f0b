"""
The decisions: (facts, limits, now) in, frozen plan out. Nothing here awaits, logs or reads a clock.

Each file answers one question, and most are named like the room that asks it:

* archiving: `upload_plan`, `upload_control`, `lineage`, `epoch_history`, `spillover`, `pinning`; for the
  local log `durability`, `local_retention`, `local_hint`, `trim_target`; for the archive `total_retention`,
  `retention_time`.
* reading: `chunk_layout`, `cache_trim`.
* space: `disk_areas`, `disk_alert`, `space_plan`.
* housekeeping: `housekeeping_turns`, `segment_merge`, `compacted_reupload`, `scrub`, `topic_lifecycle`.
* recovery: `recovery`. Rebuild: `manifest_rebuild`, `valid_rewritings`. Jobs: `rewriting`,
  `record_removal`.
* commands: `explanation`, `limit_wording`.
"""
