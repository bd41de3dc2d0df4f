"""Which workers there are and how they are: members by configuration and registry, life by connection."""
