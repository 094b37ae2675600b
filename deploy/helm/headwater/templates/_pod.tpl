{{- /* What all pods have in common. (dict "root" $ "stage" NAME "grace" SECONDS "spread" BOOL "of" VALUES) */ -}}
{{- define "headwater.podSettings" -}}
automountServiceAccountToken: false
{{- with .root.Values.serviceAccountName | default (.root.Values.serviceAccount.create | ternary (include "headwater.name" .root) "") }}
serviceAccountName: {{ . }}
{{- end }}
# Variables that Kubernetes makes of services, such as HEADWATER_PORT, would be taken for settings.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- if .spread }}
topologySpreadConstraints: {{ include "headwater.spread" . | nindent 2 }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{- /* Constraints that spread a stage's pods: those of its values, or one that prefers different nodes. A constraint
without a selector counts the pods of one rollout alone: pods that leave would keep new ones from their nodes. */ -}}
{{- define "headwater.spread" -}}
{{- $selector := dict "matchLabels" (include "headwater.selector" . | fromYaml) -}}
{{- $pods := dict "labelSelector" $selector "matchLabelKeys" (list "pod-template-hash") -}}
{{- $nodes := dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" -}}
{{- range .of.topologySpreadConstraints | default (list $nodes) }}
{{- if hasKey . "labelSelector" }}
- {{ toJson . }}
{{- else }}
- {{ merge (deepCopy .) $pods | toJson }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "headwater.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- /* (dict "root" $): annotations of pods; a rotation of passwords restarts them. */ -}}
{{- define "headwater.podAnnotations" -}}
headwater/rotation: {{ .root.Values.access.rotation | quote }}
{{- with .root.Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* (dict "root" $): NATS and Valkey read who may do what when they start: other rights restart them. */ -}}
{{- define "headwater.serverAnnotations" -}}
{{ include "headwater.podAnnotations" . }}
headwater/rights: {{ .root.Files.Get "files/rights.json" | sha256sum | trunc 8 | quote }}
{{- end -}}

{{- /* Variables that the chart sets on every stage, as YAML. */ -}}
{{- define "headwater.ownEnv" -}}
{{- if eq .stage "gateway" }}
{{- /* `kubectl port-forward` comes in by the pod's loopback. */}}
- {name: HEADWATER_HOST, value: "::"}
{{- else }}
- name: HEADWATER_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
- name: {{ eq .stage "gateway" | ternary "HEADWATER_GATEWAY_ID" "HEADWATER_REPLICA_ID" }}
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: HEADWATER_DRAIN_LIMIT, value: {{ .drain | quote }}}
- {name: HEADWATER_LOG_LEVEL, value: {{ .root.Values.logLevel | quote }}}
- {name: HEADWATER_METRICS_PORT, value: "9100"}
- {name: HOME, value: /tmp}
{{- with .root.Values.otlpEndpoint }}
- {name: HEADWATER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- if .root.Values.stageTls.secret }}
- {name: HEADWATER_STAGE_TLS_CERT_FILE, value: /tls/stage/tls.crt}
- {name: HEADWATER_STAGE_TLS_KEY_FILE, value: /tls/stage/tls.key}
- {name: HEADWATER_STAGE_TLS_CA_FILE, value: /tls/stage/ca.crt}
- {name: HEADWATER_STAGE_TLS_NAME, value: {{ .root.Values.stageTls.name | quote }}}
{{- end }}
{{- if eq .role "engine" }}
- {name: TRITON_CACHE_DIR, value: /cache/kernels}
- {name: NUMBA_CACHE_DIR, value: /cache/kernels}
{{- end }}
{{- end -}}

{{- /* Variables of a stage: the chart's own, and those of `env`, which win: Kubernetes refuses a name that comes twice.
(dict "root" $ "stage" NAME "role" ROLE "drain" SECONDS "env" MAP) */ -}}
{{- define "headwater.env" -}}
{{- $given := .env -}}
{{- range include "headwater.ownEnv" . | fromYamlArray }}
{{- if not (hasKey $given .name) }}
- {{ toJson . }}
{{- end }}
{{- end }}
{{- range $name, $value := $given }}
- {name: {{ $name }}, value: {{ include "headwater.text" $value | quote }}}
{{- end }}
{{- end -}}

{{- /* Addresses, passwords and the cluster's token, of the stage's role alone. */ -}}
{{- define "headwater.envFrom" -}}
envFrom:
  - secretRef: {name: {{ include "headwater.secrets" .root }}-{{ .role }}}
  {{- with .own.envFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Mounts, volumes and variables of all stages; `own` has the values of the stage. */ -}}
{{- define "headwater.commonMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.stageTls.secret }}
- {name: stage-tls, mountPath: /tls/stage, readOnly: true}
{{- end }}
{{- with .own.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headwater.commonVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
{{- with .root.Values.stageTls.secret }}
- name: stage-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .own.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headwater.modelsVolume" -}}
- name: models
  persistentVolumeClaim:
    claimName: {{ .root.Values.models.volume.existingClaim | default (printf "%s-models" (include "headwater.name" .root)) }}
{{- end -}}

{{- define "headwater.modelsMount" -}}
- {name: models, mountPath: /models, subPath: models, readOnly: true}
{{- end -}}

{{- /* Waits until the jobs have put the models there. (dict "root" $ "image" IMAGE "engines" LIST) */ -}}
{{- define "headwater.awaitModels" -}}
- name: await-models
  {{- include "headwater.image" . | nindent 2 }}
  command: [sh, -c, 'for folder in "$@"; do until [ -e "$folder" ]; do sleep 0.5; done; done', await-models]
  args:
    {{- range .engines }}
    - {{ .folder }}
    {{- end }}
  {{- include "headwater.containerSecurity" . | nindent 2 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts: {{ include "headwater.modelsMount" . | nindent 4 }}
{{- end -}}

{{- /* Start: the stage has become ready once, however long that took. Live: the process answers, also while it drains. Ready:
it takes new work. With certificates Kubernetes cannot ask by itself, so that the stage's own probe does. */ -}}
{{- define "headwater.grpcProbes" -}}
startupProbe:
  {{- include "headwater.grpcProbe" . | nindent 2 }}
  periodSeconds: {{ .root.Values.probes.periodSeconds }}
  timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
  failureThreshold: {{ include "headwater.startFailures" .root }}
livenessProbe:
  {{- include "headwater.grpcProbe" (merge (dict "service" "live") .) | nindent 2 }}
  periodSeconds: {{ .root.Values.probes.periodSeconds }}
  timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
  failureThreshold: 6
readinessProbe:
  {{- include "headwater.grpcProbe" . | nindent 2 }}
  periodSeconds: {{ .root.Values.probes.periodSeconds }}
  timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
  failureThreshold: 2
{{- end -}}

{{- /* How often the start probe may fail; Kubernetes wants one at least. */ -}}
{{- define "headwater.startFailures" -}}
{{- max 1 (div .Values.probes.startSeconds .Values.probes.periodSeconds) -}}
{{- end -}}

{{- define "headwater.grpcProbe" -}}
{{- if .root.Values.stageTls.secret -}}
exec:
  command: [sh, -c, 'exec python3 -m headwater.services.runtime.health_probe --service={{ .service | default "" }} "$HEADWATER_HOST:9000"']
{{- else -}}
grpc:
  port: 9000
  service: {{ .service | default "" | quote }}
{{- end -}}
{{- end -}}

{{- /* (dict "root" $ "path" PATH "failures" COUNT) */ -}}
{{- define "headwater.httpProbe" -}}
httpGet:
  path: {{ .path }}
  port: 8000
  scheme: {{ .root.Values.clientTls.secret | empty | ternary "HTTP" "HTTPS" }}
periodSeconds: {{ .root.Values.probes.periodSeconds }}
timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
failureThreshold: {{ .failures }}
{{- end -}}
