"""(facts, limits, now) in, frozen plan out. Nothing here awaits, logs or reads a clock."""
