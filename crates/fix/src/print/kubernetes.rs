use crate::print::snapshot::Snapshot;
use crate::print::template::fill;

pub(super) fn text(snapshot: &Snapshot) -> String {
    fill(TEMPLATE, &[("range", &format!("{} to {}", snapshot.low, snapshot.high))])
}

const TEMPLATE: &str = r#"# Kubernetes, source ports of a pod. Copy securityContext to your pod, or to the template of your deployment.
# A pod has a network namespace with sysctls of its own: its range is the kernel's default, 32768 60999, even if
# the node has another (this host: @range@). With hostNetwork: true Kubernetes refuses net.* sysctls; set them on the node (fourtuple fix --print sysctl).
apiVersion: v1
kind: Pod
metadata:
  name: fourtuple
spec:
  securityContext:
    sysctls:
    # Safe sysctl, allowed by default: 64512 ports for each destination instead of 28232.
    - name: net.ipv4.ip_local_port_range
      value: "1024 65535"
    # Ports on which the pod's containers listen, so that no connection takes one. Safe since Kubernetes 1.27; remove this before.
    - name: net.ipv4.ip_local_reserved_ports
      value: "8080"
    # Not a safe sysctl: namespaces with the Pod Security level baseline or restricted refuse the pod, and it starts only if the kubelet has
    # --allowed-unsafe-sysctls=net.ipv4.tcp_tw_reuse.
    # TIME_WAIT ports to all destinations are used again after 1 s, if both sides have TCP timestamps; the default, 2, is for loopback.
    # - name: net.ipv4.tcp_tw_reuse
    #   value: "1"
  containers:
  - name: program
    image: registry.example/program:1
    ports:
    - containerPort: 8080

# What Kubernetes cannot do: set socket options, and so end the long search of connect() beyond half of the range. For a running
# container `fourtuple fix ports --container ID` does, on its node.
# connect() sees the address of a Service: one destination, however many pods are behind it.
"#;
