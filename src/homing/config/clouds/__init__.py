"""What the run file may say to one provider: one section per cloud, `cloud.NAME`."""
