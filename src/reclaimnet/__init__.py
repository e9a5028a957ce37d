"""ReclaimNet: every GPU is on loan, and the owner's reclaim is a contract."""
