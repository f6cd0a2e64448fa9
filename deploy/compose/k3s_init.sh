#!/bin/sh
# Prepare the k3s node for Millrace and write the kubeconfig with which Airflow reaches it. Safe to repeat.
set -eu
umask 027
here=$(dirname "$0")
export KUBECONFIG=${TMPDIR:-/tmp}/admin.yaml
# k3s writes its own address as its own containers see it.
sed 's#https://127.0.0.1:6443#https://k3s:6443#' "$KUBE/admin.yaml" > "$KUBECONFIG"

sed "s/SUBNET/$MILLRACE_SUBNET/" "$here/kubernetes.yaml" | kubectl apply -f -
printf 'AWS_ACCESS_KEY_ID=%s\nAWS_SECRET_ACCESS_KEY=%s\n' "$AWS_ACCESS_KEY_ID" "$AWS_SECRET_ACCESS_KEY" |
  kubectl create secret generic millrace-store -n millrace --from-env-file=/dev/stdin --dry-run=client -o yaml |
  kubectl apply -f -

# The cluster fills in the token some moments after the account is made.
of_token() { kubectl get secret airflow-token -n millrace -o "jsonpath={.data.$1}"; }
tries=0
while token=$(of_token token) && [ -z "$token" ]; do
  tries=$((tries + 1))
  [ "$tries" -lt 60 ] || { echo "the account 'airflow' got no token within a minute" >&2; exit 1; }
  sleep 1
done
cat > "$KUBE/airflow.yaml.partial" <<END
apiVersion: v1
kind: Config
current-context: millrace
contexts: [{name: millrace, context: {cluster: k3s, user: airflow, namespace: millrace}}]
clusters: [{name: k3s, cluster: {server: "https://k3s:6443", certificate-authority-data: "$(of_token 'ca\.crt')"}}]
users: [{name: airflow, user: {token: "$(printf %s "$token" | base64 -d)"}}]
END
# Read by Airflow's group; the administrator's own file stays with root.
mv "$KUBE/airflow.yaml.partial" "$KUBE/airflow.yaml"
echo ready
