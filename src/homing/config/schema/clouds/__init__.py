"""Provider-specific sections of the run file, one per cloud: `cloud.NAME`."""
