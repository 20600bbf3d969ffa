"""Operating it: settings, command line, local services, rehearsal. It reads the settings and passes values on."""
