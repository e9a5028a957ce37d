"""stub"""
LEAD_MS = 100
MAX_PROBES = 5
