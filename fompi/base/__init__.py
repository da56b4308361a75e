"""The ground: errors, layouts, file checks and the version. It imports nothing of fompi."""
