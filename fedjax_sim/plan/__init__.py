"""Who trains, and when: selection, schedule, and where models go between two rounds."""
