{{- /* The pod of an engine, as a template. (dict "root" $ "engine" MAP "of" MAP "gpus" COUNT) */ -}}
{{- define "headwater.enginePod" -}}
{{- $root := .root -}}
{{- $of := .of -}}
{{- $gpus := .gpus -}}
{{- with .engine }}
metadata:
  labels:
    {{- include "headwater.podLabels" $of | nindent 4 }}
    headwater/stage: engine
  annotations: {{ include "headwater.podAnnotations" $of | nindent 4 }}
spec:
  {{- include "headwater.podSettings" (merge (dict "grace" (add .drainSeconds 15) "spread" true "of" .) $of) | nindent 2 }}
  initContainers:
    {{- include "headwater.awaitModels" (dict "root" $root "image" .image "engines" (list .)) | nindent 4 }}
    {{- if gt (int .hosts) 1 }}
    {{- include "headwater.stageSecret" (dict "root" $root "engine" .) | nindent 4 }}
    {{- end }}
  containers:
    - name: engine
      {{- include "headwater.image" (dict "root" $root "image" .image) | nindent 6 }}
      command: [headwater, serve, engine]
      args:
        - --port=9000
        - --model-folder={{ .folder }}
        - {{ printf "--served-model-name=%s" (include "headwater.servedName" .) | quote }}
        - --device={{ .device }}
        - --dtype={{ .dtype }}
        - --block-size={{ include "headwater.blockSize" $root }}
        {{- if eq .device "cuda" }}
        {{- $env := .env }}
        {{- /* An engine refuses more requests at once than a step has tokens. */}}
        {{- $budget := get $env "HEADWATER_MAX_NUM_BATCHED_TOKENS" | default 2048 | int }}
        {{- range $name, $number := dict "max-num-seqs" (min 512 $budget) "max-num-batched-tokens" 2048 }}
        {{- if not (hasKey $env (printf "HEADWATER_%s" ($name | replace "-" "_" | upper))) }}
        - --{{ $name }}={{ $number }}
        {{- end }}
        {{- end }}
        {{- end }}
        {{- with .threads | default (include "headwater.limitedCores" .) }}
        - --threads={{ . }}
        {{- end }}
        {{- if ne .role "both" }}
        - --role={{ .role }}
        {{- end }}
        {{- if gt (int .tensorParallelSize) 1 }}
        - --tensor-parallel-size={{ .tensorParallelSize }}
        {{- end }}
        {{- if gt (int .pipelineParallelSize) 1 }}
        - --pipeline-parallel-size={{ .pipelineParallelSize }}
        {{- end }}
        {{- if gt (int .hosts) 1 }}
        - --stage-hosts={{ sub (int .hosts) 1 }}
        - --stage-listen=$(HEADWATER_HOST):{{ include "headwater.stagePort" . }}
        - --stage-secret-file=/stage/stage-secret
        {{- end }}
        {{- with .args }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env: {{ include "headwater.env" (merge (dict "drain" .drainSeconds "env" .env) $of) | nindent 8 }}
      {{- include "headwater.envFrom" $of | nindent 6 }}
      ports:
        - {name: calls, containerPort: 9000}
        - {name: metrics, containerPort: 9100}
      {{- include "headwater.containerSecurity" $root | nindent 6 }}
      resources:
        {{- if $gpus }}
        {{- toYaml (mergeOverwrite (deepCopy .resources) (dict "limits" (dict "nvidia.com/gpu" $gpus))) | nindent 8 }}
        {{- else }}
        {{- toYaml .resources | nindent 8 }}
        {{- end }}
      {{- include "headwater.grpcProbes" $of | nindent 6 }}
      volumeMounts:
        {{- include "headwater.commonMounts" $of | nindent 8 }}
        {{- include "headwater.modelsMount" $of | nindent 8 }}
        {{- if $root.Values.kernelCache.shared }}
        - {name: models, mountPath: /cache/kernels, subPath: kernels}
        {{- else }}
        - {name: kernels, mountPath: /cache/kernels}
        {{- end }}
        - {name: shm, mountPath: /dev/shm}
        {{- if gt (int .hosts) 1 }}
        - {name: stage, mountPath: /stage, readOnly: true}
        {{- end }}
  volumes:
    {{- include "headwater.commonVolumes" $of | nindent 4 }}
    {{- include "headwater.modelsVolume" $of | nindent 4 }}
    {{- if not $root.Values.kernelCache.shared }}
    - name: kernels
      emptyDir: {sizeLimit: {{ $root.Values.kernelCache.sizeLimit }}}
    {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 1Gi}
    {{- if gt (int .hosts) 1 }}
    {{- include "headwater.stageVolumes" $root | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}

{{- /* The pod of a pipeline stage on a host of its own, which joins the engine of its group. The same arguments. */ -}}
{{- define "headwater.stagePod" -}}
{{- $root := .root -}}
{{- $of := .of -}}
{{- $gpus := .gpus -}}
{{- with .engine }}
metadata:
  labels:
    {{- include "headwater.podLabels" $of | nindent 4 }}
    headwater/stage: engine
  annotations: {{ include "headwater.podAnnotations" $of | nindent 4 }}
spec:
  {{- include "headwater.podSettings" (merge (dict "grace" (add .drainSeconds 15) "spread" true "of" .) $of) | nindent 2 }}
  initContainers:
    {{- include "headwater.awaitModels" (dict "root" $root "image" .image "engines" (list .)) | nindent 4 }}
    {{- include "headwater.stageSecret" (dict "root" $root "engine" .) | nindent 4 }}
  containers:
    - name: stage
      {{- include "headwater.image" (dict "root" $root "image" .image) | nindent 6 }}
      command: [headwater, serve, stage]
      args:
        # LeaderWorkerSet sets the variable in each pod.
        - --join=$(LWS_LEADER_ADDRESS):{{ include "headwater.stagePort" . }}
        - --stage-secret-file=/stage/stage-secret
        - --model-folder={{ .folder }}
        - --log-level={{ $root.Values.logLevel }}
        {{- with .threads | default (include "headwater.limitedCores" .) }}
        - --threads={{ . }}
        {{- end }}
      env:
        - {name: HOME, value: /tmp}
        - {name: TRITON_CACHE_DIR, value: /cache/kernels}
        - {name: NUMBA_CACHE_DIR, value: /cache/kernels}
        {{- range $name, $value := omit .env "HOME" "TRITON_CACHE_DIR" "NUMBA_CACHE_DIR" }}
        - {name: {{ $name }}, value: {{ include "headwater.text" $value | quote }}}
        {{- end }}
      {{- include "headwater.containerSecurity" $root | nindent 6 }}
      resources:
        {{- if $gpus }}
        {{- toYaml (mergeOverwrite (deepCopy .resources) (dict "limits" (dict "nvidia.com/gpu" $gpus))) | nindent 8 }}
        {{- else }}
        {{- toYaml .resources | nindent 8 }}
        {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- include "headwater.modelsMount" $of | nindent 8 }}
        - {name: kernels, mountPath: /cache/kernels}
        - {name: shm, mountPath: /dev/shm}
        - {name: stage, mountPath: /stage, readOnly: true}
        {{- with .extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 2Gi}
    {{- include "headwater.modelsVolume" $of | nindent 4 }}
    - name: kernels
      emptyDir: {sizeLimit: {{ $root.Values.kernelCache.sizeLimit }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 1Gi}
    {{- include "headwater.stageVolumes" $root | nindent 4 }}
    {{- with .extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}

{{- define "headwater.stagePort" -}}7300{{- end -}}

{{- /* Copies the secret of stages: a stage wants a file that its user alone can read, and a mounted one is its group's. */ -}}
{{- define "headwater.stageSecret" -}}
- name: stage-secret
  {{- include "headwater.image" (dict "root" .root "image" .engine.image) | nindent 2 }}
  command: [sh, -c, 'umask 077; cat /secret/stage-secret > /stage/stage-secret']
  {{- include "headwater.containerSecurity" .root | nindent 2 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: stage-secret, mountPath: /secret, readOnly: true}
    - {name: stage, mountPath: /stage}
{{- end -}}

{{- define "headwater.stageVolumes" -}}
- name: stage-secret
  secret: {secretName: {{ include "headwater.secrets" . }}-stages, defaultMode: 0440}
- name: stage
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end -}}
