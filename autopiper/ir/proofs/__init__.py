"""The proofs of `ir.verify`, one file per subject. They know the graph and the Programs, and nothing of how those were written."""
