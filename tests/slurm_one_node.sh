#!/usr/bin/env bash
# Start a SLURM controller with this machine as its only node, for tests/cli/test_slurm.py. Needs
# root on Debian or Ubuntu; installs slurm-wlm and munge where they are missing, and replaces
# /etc/slurm/slurm.conf. `tests/slurm_one_node.sh stop` ends the daemons.
set -euo pipefail
if [ "${1:-}" = stop ]; then
  for file in /run/slurmd.pid /run/slurmctld.pid /run/munge/munged.pid; do
    [ ! -f "$file" ] || kill "$(cat "$file")"
  done
  exit
fi
if ! command -v slurmctld >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge >/dev/null
fi
host=$(hostname -s) # cred_expire: a requeued job waits as long, by default two minutes
mkdir -p /etc/slurm /var/spool/slurmctld /var/spool/slurmd /var/log/slurm /run/munge
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=covon
SlurmctldHost=$host(127.0.0.1)
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
KillWait=5
ReturnToService=2
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=4000
PartitionName=main Nodes=ALL Default=YES
CONF
[ -f /etc/munge/munge.key ] || mungekey --create
chown -R munge /etc/munge /var/lib/munge /var/log/munge /run/munge
setpriv --reuid=munge --regid=munge --clear-groups munged
sleep 1
slurmctld
slurmd
for _ in {1..20}; do
  [ "$(sinfo --noheader --format=%t)" = idle ] && exit
  sleep 1
done
sinfo
exit 1
