{{- define "headwater.name" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* (dict "root" $ "stage" NAME): labels by which objects find a stage's pods. */ -}}
{{- define "headwater.selector" -}}
app.kubernetes.io/name: headwater
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .stage }}
{{- end -}}

{{- /* Labels of a stage's pods: those that objects find them by, and those of the values. */ -}}
{{- define "headwater.podLabels" -}}
{{ include "headwater.selector" . }}
{{- with .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headwater.labels" -}}
{{ include "headwater.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /* (dict "root" $ "image" MAP) */ -}}
{{- define "headwater.image" -}}
{{- $registry := .root.Values.images.registry -}}
{{- $prefix := and $registry (hasPrefix "headwater-" .image.repository) | empty | ternary "" (printf "%s/" $registry) -}}
{{- $digest := .image.digest | default "" | empty | ternary "" (printf "@%s" .image.digest) }}
image: {{ printf "%s%s:%s%s" $prefix .image.repository (include "headwater.text" (.image.tag | default .root.Chart.AppVersion)) $digest | quote }}
imagePullPolicy: {{ .image.pullPolicy | default "IfNotPresent" }}
{{- end -}}

{{- /* A value as text. YAML's numbers are floats to Helm, and large ones would be written as 1e+06. */ -}}
{{- define "headwater.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}{{ else }}{{ toString . }}{{ end -}}
{{- end -}}

{{- /* Addresses of the chart's own NATS, one a server. (dict "root" $ "user" NAME "password" TEXT "port" NUMBER) */ -}}
{{- define "headwater.natsUrl" -}}
{{- $service := printf "%s-nats" (include "headwater.name" .root) -}}
{{- $hosts := list $service -}}
{{- if gt (int .root.Values.nats.replicas) 1 -}}
{{- $hosts = list -}}
{{- range until (int .root.Values.nats.replicas) }}{{ $hosts = append $hosts (printf "%s-%d.%s" $service . $service) }}{{ end -}}
{{- end -}}
{{- range $i, $host := $hosts }}{{ if $i }},{{ end }}nats://{{ $.user }}:{{ $.password }}@{{ $host }}:{{ $.port }}{{ end -}}
{{- end -}}

{{- /* Address of the chart's own Valkey, or of its Sentinels. (dict "root" $ "user" NAME "password" TEXT "sentinel" TEXT) */ -}}
{{- define "headwater.valkeyUrl" -}}
{{- $service := printf "%s-valkey" (include "headwater.name" .root) -}}
{{- $hosts := list -}}
{{- range until (int .root.Values.valkey.replicas) }}{{ $hosts = append $hosts (printf "%s-%d.%s:26379" $service . $service) }}{{ end -}}
{{- if gt (len $hosts) 1 -}}
redis+sentinel://{{ .user }}:{{ .password }}@{{ join "," $hosts }}/headwater?sentinel_password={{ .sentinel }}
{{- else -}}
redis://{{ .user }}:{{ .password }}@{{ $service }}:6379
{{- end -}}
{{- end -}}

{{- /* Start of the names of the secrets. */ -}}
{{- define "headwater.secrets" -}}
{{- .Values.access.existingSecrets | default (include "headwater.name" .) -}}
{{- end -}}

{{- /* (dict "root" $ "engine" MAP): name of an engine's ScaledObject. KEDA makes a label of it, which has 63 characters
at most. The Deployment may have a longer one, which it keeps: another name would replace the pods of a release. */ -}}
{{- define "headwater.scaledObjectName" -}}
{{- $full := printf "%s-engine-%s" (include "headwater.name" .root) .engine.name -}}
{{- if le (len $full) 63 }}{{ $full }}{{ else }}{{ $full | trunc 54 | trimSuffix "-" }}-{{ sha256sum $full | trunc 8 }}{{ end -}}
{{- end -}}

{{- /* Engines with their defaults, the image of their device and the folder of their model, as JSON. Another model, or one
converted by another version, has another folder: its pods wait for its job and never start with what was there before. */ -}}
{{- define "headwater.engines" -}}
{{- $engines := list -}}
{{- range .Values.engines -}}
{{- $engine := mergeOverwrite (deepCopy $.Values.engineDefaults) . -}}
{{- $image := eq $engine.device "cpu" | ternary $.Values.images.engineCpu $.Values.images.engine -}}
{{- $_ := set $engine "image" (merge (dict) $engine.image $image) -}}
{{- $made := list $engine.model $engine.revision $engine.device $engine.dtype (include "headwater.image" (dict "root" $ "image" $engine.image)) -}}
{{- $_ := set $engine "folder" (printf "/models/served-%s-%s" $engine.name (toJson $made | sha256sum | trunc 8)) -}}
{{- $engines = append $engines $engine -}}
{{- end -}}
{{- toJson $engines -}}
{{- end -}}

{{- /* Cores that an engine may take by its limit, a part of one counted as one; nothing without a limit. It sees those of
its node: a thread for each would wait for the others most of the time. */ -}}
{{- define "headwater.limitedCores" -}}
{{- with dig "limits" "cpu" "" .resources | toString -}}
{{- hasSuffix "m" . | ternary (div (add (trimSuffix "m" . | int) 999) 1000) (ceil (float64 .)) -}}
{{- end -}}
{{- end -}}

{{- /* Mebibytes of a quantity of memory, rounded down. */ -}}
{{- define "headwater.mebibytes" -}}
{{- $number := regexFind "^[0-9.]+" . | float64 -}}
{{- $unit := regexReplaceAll "^[0-9.]+" . "" -}}
{{- $bytes := get (dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12) $unit | default 1.0 -}}
{{- divf (mulf $number $bytes) 1048576.0 | floor | printf "%.0f" -}}
{{- end -}}

{{- define "headwater.servedName" -}}
{{- .servedModelName | default .model -}}
{{- end -}}

{{- /* One engine of each served model, as JSON: engines of several entries, such as those of two roles, may serve the same. */ -}}
{{- define "headwater.servedModels" -}}
{{- $found := dict -}}
{{- $engines := list -}}
{{- range include "headwater.engines" . | fromJsonArray -}}
{{- $served := include "headwater.servedName" . -}}
{{- if not (hasKey $found $served) -}}
{{- $_ := set $found $served true -}}
{{- $engines = append $engines . -}}
{{- end -}}
{{- end -}}
{{- toJson $engines -}}
{{- end -}}

{{- /* Tokens a KV block: stages that hash prompts and those that cache them want the same. */ -}}
{{- define "headwater.blockSize" -}}
{{- $size := 16 -}}
{{- range include "headwater.engines" . | fromJsonArray }}{{ if eq .device "cuda" }}{{ $size = 64 }}{{ end }}{{ end -}}
{{- .Values.blockSize | default $size -}}
{{- end -}}

{{- /* Whether the number of an engine's replicas follows demand: "true" or nothing. */ -}}
{{- define "headwater.isScaled" -}}
{{- if and .root.Values.keda.enabled (ne (int .engine.minReplicas) (int .engine.maxReplicas)) }}true{{ end -}}
{{- end -}}

{{- /* Whether the first request starts an engine of some model: "true" or nothing. */ -}}
{{- define "headwater.startsByRequest" -}}
{{- range include "headwater.engines" . | fromJsonArray }}{{ if and (include "headwater.isScaled" (dict "root" $ "engine" .)) (not (int .minReplicas)) }}true{{ end }}{{ end -}}
{{- end -}}

{{- /* Whether an engine has stages on other hosts: "true" or nothing. */ -}}
{{- define "headwater.hasStageHosts" -}}
{{- range include "headwater.engines" . | fromJsonArray }}{{ if gt (int .hosts) 1 }}true{{ end }}{{ end -}}
{{- end -}}

{{- /* Port of a URL; nothing where it names none. */ -}}
{{- define "headwater.portOf" -}}
{{- regexReplaceAll "^.*@" . "" | regexFind ":[0-9]+([/?]|$)" | trimAll ":/?" -}}
{{- end -}}

{{- /* Ports of an outside NATS and Redis, as JSON: those that are given, and those in their URLs. */ -}}
{{- define "headwater.outsidePorts" -}}
{{- $ports := list -}}
{{- range .Values.networkPolicy.outsidePorts }}{{ $ports = append $ports (int .) }}{{ end -}}
{{- range splitList "," (printf "%s,%s" .Values.nats.url .Values.valkey.url) -}}
{{- with include "headwater.portOf" . }}{{ $ports = append $ports (int .) }}{{ end -}}
{{- end -}}
{{- uniq $ports | toJson -}}
{{- end -}}
