"""Ray: functions are tasks of a Ray cluster, or of a Ray that is started on this machine."""
