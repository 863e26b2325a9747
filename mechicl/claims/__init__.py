"""The claims that come with mechicl, one YAML file each (see `mechicl.studies.claims`)."""
